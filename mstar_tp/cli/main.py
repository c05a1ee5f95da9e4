"""The ``mstar-tp`` command. What goes wrong is one clear message on stderr, never a traceback."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mstar_tp.bench.bench_flags import add_bench
from mstar_tp.common import env, log
from mstar_tp.common.errors import MstarError
from mstar_tp.common.version import VERSION
from mstar_tp.config import LoraConfig
from mstar_tp.config.server_flags import (
    DEFAULT_INSTANCE,
    ClearParser,
    ModelParser,
    add_config_arguments,
    config_from_args,
)
from mstar_tp.tools.convert.convert_flags import add_convert
from mstar_tp.tools.merge.merge_flags import add_merge
from mstar_tp.tools.top.top_flags import add_top

Commands = Any  # argparse keeps the type of add_subparsers to itself

DESCRIPTION = "Serve one base model with many LoRA adapters behind the OpenAI API."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0 when all went well, 1 on a failure, 2 on a bad flag."""
    _open_missing()
    args = build_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does: nothing more can be said there.
        _drop_output()
        return 1
    except MstarError as error:
        if log.is_json():
            logging.getLogger(__name__).error("%s", error)
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A path that may not be looked at, or an output that takes no more.
        where = error.filename or "the output cannot be written"
        print(f"error: {os.fsdecode(where)}: {error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return 130


def _open_missing() -> None:
    """A shell may have closed the streams that everything here writes to."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def _drop_output() -> None:
    """What is left to write goes nowhere, or the interpreter would fail on it again at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = ClearParser(
        prog="mstar-tp", description=DESCRIPTION, epilog=_variables(), allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=ModelParser)

    serve = commands.add_parser(
        "serve",
        help="start the ranks of this machine and the API",
        description="Start the ranks of this machine and the API that serves them.",
        allow_abbrev=False,
    )
    add_config_arguments(serve)
    serve.set_defaults(command=_serve)

    frontend = commands.add_parser(
        "frontend",
        help="start the API alone, for ranks that torchrun starts",
        description="Start the API alone and wait for ranks that torchrun starts with "
        "`-m mstar_tp.worker MODEL --frontend ADDRESS` and the same flags.",
        allow_abbrev=False,
    )
    add_config_arguments(frontend)
    frontend.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="where ranks find this process: tcp://INTERFACE[:PORT], or ipc (the address is shown)",
    )
    frontend.add_argument(
        "--instance-id",
        default=DEFAULT_INSTANCE,
        metavar="NAME",
        help="the ranks' --instance-id (default %(default)s)",
    )
    frontend.set_defaults(command=_frontend)

    _add_check(commands)
    _add_inspect(commands)

    replay = commands.add_parser(
        "replay",
        help="rebuild a rank's tables from what it recorded, and compare two recordings",
        description="Rebuild a rank's slots, CPU cache, served names, pages and requests at any "
        "step from what it recorded with --record: no device, no files, no other ranks. Exit code "
        "1 when two recordings differ, or when the rank's own tables were not what the order it "
        "applied makes of them.",
        allow_abbrev=False,
    )
    replay.add_argument(
        "file",
        metavar="FILE",
        help="a rank's recording, or what --record was given (rank 0's is read then)",
    )
    replay.add_argument(
        "--step", type=int, metavar="N", help="show step N, and the tables before and after it"
    )
    replay.add_argument(
        "--compare",
        metavar="OTHER",
        help="a second recording: name the first step where the two differ, and in which table",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.set_defaults(command=_replay)

    add_merge(commands)
    add_convert(commands)
    add_bench(commands)
    add_top(commands)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        help="say all that is wrong with a deployment, before any rank starts",
        description="Check what serve would start with the same file and flags: keys, model, "
        "weight files' headers, every adapter, memory, addresses. All problems come in one report. "
        "Reads headers only, unless --digests is given. Exit code 0 when it can be started, "
        "1 when not.",
        allow_abbrev=False,
    )
    add_config_arguments(check)
    _add_report_arguments(check)
    check.set_defaults(command=_check)


def _add_inspect(commands: Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what an adapter, a folder of adapters or a model is",
        description="Say what is at PATH (an adapter, a folder of adapters, a base model), and all "
        "for which it would be refused. Exit code 0 when all of it can be served, 1 when not.",
        allow_abbrev=False,
    )
    inspect.add_argument("path", metavar="PATH", help="an adapter, a folder of them, or a model")
    inspect.add_argument(
        "--model", metavar="FOLDER", help="judge adapters against this base model, too"
    )
    inspect.add_argument(
        "--tensor-parallel-size",
        "--tp",
        "-tp",
        dest="tp",
        type=_positive,
        default=1,
        metavar="N",
        help="say what each of N ranks would hold (default 1)",
    )
    inspect.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype that the model would be served in (default auto)",
    )
    lora = LoraConfig()
    inspect.add_argument(
        "--max-lora-rank",
        type=_positive,
        default=lora.max_lora_rank,
        metavar="N",
        help="as serve's (default %(default)s)",
    )
    inspect.add_argument(
        "--max-lora-saved-rows",
        type=_not_negative,
        default=lora.max_lora_saved_rows,
        metavar="N",
        help="as serve's (default %(default)s)",
    )
    _add_report_arguments(inspect)
    inspect.set_defaults(command=_inspect)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--digests",
        action="store_true",
        help="read the weights too: numbers that are not finite, copies of base weights, digests",
    )
    parser.add_argument("--all", action="store_true", help="show every line of long lists")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    return _number(text, 1)


def _not_negative(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from {least}")
    return int(text)


def _variables() -> str:
    width = max(len(name) for name in env.VARIABLES)
    lines = [f"  {name:{width}}  {meaning}" for name, meaning in env.VARIABLES.items()]
    return "environment variables:\n" + "\n".join(lines)


def _version(_: argparse.Namespace) -> int:
    print(VERSION)
    return 0


def _serve(args: argparse.Namespace) -> int:
    return _run(args, bind="ipc", instance_id=None, start_ranks=True)


def _frontend(args: argparse.Namespace) -> int:
    return _run(args, bind=args.listen, instance_id=args.instance_id, start_ranks=False)


def _check(args: argparse.Namespace) -> int:
    from mstar_tp.tools.check.check_command import check_command

    return check_command(args)


def _inspect(args: argparse.Namespace) -> int:
    from mstar_tp.tools.check.check_command import inspect_command

    return inspect_command(args)


def _replay(args: argparse.Namespace) -> int:
    from mstar_tp.tools.replay.replay_command import replay

    return replay(args.file, step=args.step, other=args.compare, as_json=args.json)


def _run(args: argparse.Namespace, *, bind: str, instance_id: str | None, start_ranks: bool) -> int:
    # Imported here: `mstar-tp version` and a bad flag should not wait for a web server's modules.
    import uvloop

    from mstar_tp.frontend.console import ServerConsole
    from mstar_tp.frontend.supervisor import FrontendOptions, Supervisor
    from mstar_tp.wire.curve import curve_from_secret

    log.setup("frontend")
    key = env.secret()
    env.faults_file()  # refused here, before any rank would refuse it
    config = config_from_args(args)
    log.setup("frontend", form=config.server.log_format)
    console = ServerConsole(as_logs=log.is_json())
    options = FrontendOptions(
        config=config,
        bind=bind,
        instance_id=instance_id,
        curve=None if key is None else curve_from_secret(key),
        start_ranks=start_ranks,
        console=console,
    )

    async def supervise() -> int:
        return await Supervisor(options).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(supervise())
    finally:
        console.close()


if __name__ == "__main__":
    sys.exit(main())
