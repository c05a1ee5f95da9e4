"""One rank: ``torchrun --nproc-per-node N -m mstar_tp.worker MODEL --frontend ADDR``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mstar_tp.common import log
from mstar_tp.common.env import faults_file, rank_env, secret
from mstar_tp.common.errors import ConfigError, MstarError
from mstar_tp.config.parsers import ModelParser
from mstar_tp.config.server_flags import DEFAULT_INSTANCE, add_config_arguments, config_from_args
from mstar_tp.wire.curve import curve_from_secret
from mstar_tp.worker.rank import NO_FAULTS, RankFaults, RankOptions, run_rank

logger = logging.getLogger(__name__)


def serve_rank(argv: Sequence[str] | None = None) -> int:
    """Serve as the rank that the environment names.

    ``argv``: its arguments; None: the command line's.

    Exit code 0 after an ordered shutdown, 1 when the rank could not start or go on. The caller ends
    the process at once: after a failure the step thread may sit in a collective that nobody ends.
    """
    args = _parser().parse_args(argv)
    try:
        place = rank_env()
        role = "leader" if place.rank == 0 else "follower"
        log.setup(role, place.rank)
        key = secret()
        config = config_from_args(args)
        log.setup(role, place.rank, config.server.log_format)
        run_rank(
            RankOptions(
                config=config,
                frontend=args.frontend,
                instance_id=args.instance_id,
                order_bind=args.order_bind,
                curve=curve_from_secret(key) if key is not None else None,
                store=args.store,
                faults=_faults(place.rank, place.restarts),
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


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--store",
        metavar="FILE",
        help="a file on this machine through which ranks meet (default: torchrun's own store)",
    )
    return parser


def _faults(rank: int, epoch: int) -> RankFaults:
    """The faults of the file that a test names; ``NO_FAULTS`` outside test mode."""
    path = faults_file()
    if path is None:
        return NO_FAULTS
    # Loaded by name, and only in test mode: serving depends on nothing of the testing package.
    testing = import_module("mstar_tp.testing.faults")
    logger.warning("test mode: this rank makes the faults that %s names", path)
    faults: RankFaults = testing.FaultyRank(testing.FaultFile(path), rank, epoch)
    return faults


if __name__ == "__main__":
    code = serve_rank()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
