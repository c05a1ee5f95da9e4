"""One rank: ``torchrun --nproc-per-node N -m mstar_tp.worker MODEL --frontend ADDR``."""

from __future__ import annotations

import logging
import os
import sys

from mstar_tp import log
from mstar_tp.env import faults_file, rank_env, secret
from mstar_tp.errors import ConfigError, MstarError
from mstar_tp.options import DEFAULT_INSTANCE, ModelParser, add_config_arguments, config_from_args
from mstar_tp.wire.curve import curve_from_secret
from mstar_tp.worker.rank import RankOptions, WrapReaders, run_rank

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit code 0 after an ordered shutdown, 1 when the rank could not start or go on."""
    parser = ModelParser(prog="python -m mstar_tp.worker", description=__doc__)
    add_config_arguments(parser)
    parser.add_argument(
        "--frontend", required=True, metavar="ADDRESS", help="where the frontend listens"
    )
    parser.add_argument(
        "--instance-id",
        default=DEFAULT_INSTANCE,
        metavar="NAME",
        help="the frontend's --instance-id (default %(default)s)",
    )
    parser.add_argument(
        "--order-bind",
        default="ipc",
        metavar="ADDRESS",
        help="where the leader listens for the other ranks: ipc (one machine, default) or "
        "tcp://INTERFACE[:PORT]",
    )
    args = parser.parse_args()
    try:
        place = rank_env()
        log.setup("leader" if place.rank == 0 else "follower", place.rank)
        key = secret()
        run_rank(
            RankOptions(
                config=config_from_args(args),
                frontend=args.frontend,
                instance_id=args.instance_id,
                epoch=place.restarts,
                order_bind=args.order_bind,
                curve=curve_from_secret(key) if key is not None else None,
                wrap_readers=_readers(place.rank),
            )
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except MstarError as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("this rank stops")
        return 1
    return 0


def _readers(rank: int) -> WrapReaders:
    """Readers as they are, or, in a test that asks for it, readers that fail at will."""
    path = faults_file()
    if path is None:
        return lambda readers: readers
    # The one way from serving to the testing package, and only in test mode.
    from mstar_tp.testing.faults import FaultFile

    logger.warning("test mode: this rank makes the faults that %s names", path)
    return FaultFile(path).wrap(rank)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure the step thread may sit in a collective that nobody will end.
    os._exit(code)
