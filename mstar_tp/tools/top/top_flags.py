"""The flags of ``mstar-tp top``."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_INTERVAL_S = 2.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0


def add_top(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "top",
        help="watch a running server: ranks, slots by adapter, queues, rates",
        description="Watch a running server on a terminal: ranks, slots by adapter, queues, tokens "
        "a second, KV pages, restarts. Reads its /metrics and /debug/state. Ctrl-C ends it. Exit "
        "code 1 when nothing answers at URL.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=DEFAULT_URL,
        help="where the server listens (default %(default)s)",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        help="the server's admin key, for slots (default: MSTAR_TP_ADMIN_KEY)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="one of its API keys, for slots where it has no admin key (default: the first of "
        "MSTAR_TP_API_KEY)",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=DEFAULT_INTERVAL_S,
        help="how often to look (default %(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, an interval apart, print one frame without colours, and end",
    )
    parser.set_defaults(command=_top)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        )
    return seconds


def _top(args: argparse.Namespace) -> int:
    from mstar_tp.tools.top.top_command import top_command

    return top_command(args)
