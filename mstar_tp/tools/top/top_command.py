"""Runs ``mstar-tp top``: reads, shows, waits; a server that goes away is waited for."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mstar_tp.common import env
from mstar_tp.tools.top.frame import frame
from mstar_tp.tools.top.polling import NoAnswerError, Reader, Reading

ONCE_SIZE = (80, 1000)
"""The size of a frame that scripts read: every rank and slot, whatever the terminal."""


def top_command(args: argparse.Namespace) -> int:
    """Exit code 0.

    Raises:
        NoAnswerError: nothing answers, before anything ever has.
    """
    reader = Reader(args.url, _key(args))
    if args.once:
        console = Console(width=ONCE_SIZE[0], color_system=None, highlight=False, soft_wrap=True)
        shown = once(reader, lambda: time.sleep(args.interval))
        console.print(shown, markup=False)
        return 0
    if not sys.stdout.isatty():
        raise NoAnswerError("top: stdout is no terminal: give --once for one plain frame")
    console = Console(highlight=False)
    first = reader.read()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            watch(
                reader,
                first,
                lambda: (console.size.width, console.size.height),
                lambda text: live.update(text, refresh=True),
                lambda: time.sleep(args.interval),
            )
        except KeyboardInterrupt:
            return 0
    return 0


def once(reader: Reader, wait: Callable[[], None]) -> Text:
    """One frame, with the rates between two readings."""
    before = reader.read()
    wait()
    return frame(reader.url, reader.read(), before, size=ONCE_SIZE)


def watch(
    reader: Reader,
    first: Reading,
    size: Callable[[], tuple[int, int]],
    show: Callable[[Text], None],
    wait: Callable[[], None],
) -> None:
    """Show frame after frame until ``wait`` or ``show`` raises.

    While the server does not answer, the last frame stays, and says so.
    """
    now, before, fault = first, None, ""
    while True:
        show(frame(reader.url, now, before, size=size(), fault=fault))
        wait()
        try:
            now, before, fault = reader.read(), now, ""
        except NoAnswerError as error:
            fault = f"gone, trying again: {str(error).removeprefix(f'{reader.url}: ')}"


def _key(args: argparse.Namespace) -> str | None:
    given: str | None = args.admin_key or env.admin_key() or args.api_key
    return given or next(iter(env.api_keys()), None)
