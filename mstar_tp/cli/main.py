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
from mstar_tp.cli.tool_flags import (
    add_check,
    add_convert,
    add_inspect,
    add_merge,
    add_replay,
    add_top,
)
from mstar_tp.common import env, log
from mstar_tp.common.errors import MstarError
from mstar_tp.common.version import VERSION
from mstar_tp.config.parsers import ClearParser, ModelParser, add_command
from mstar_tp.config.server_flags import DEFAULT_INSTANCE, add_config_arguments, config_from_args

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
    """Send the rest of the output nowhere, or the interpreter would fail on it again at its end."""
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

    _add_serve(commands)
    _add_frontend(commands)
    add_check(commands)
    add_inspect(commands)
    add_replay(commands)
    add_merge(commands)
    add_convert(commands)
    add_bench(commands)
    add_top(commands)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        _serve,
        help="start the ranks of this machine and the API",
        description="Start the ranks of this machine and the API that serves them.",
    )
    add_config_arguments(serve)


def _add_frontend(commands: Commands) -> None:
    frontend = add_command(
        commands,
        "frontend",
        _frontend,
        help="start the API alone, for ranks that torchrun starts",
        description="Start the API alone and wait for ranks that torchrun starts with "
        "`-m mstar_tp.worker MODEL --frontend ADDRESS` and the same flags.",
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
