"""Prints reports and shows progress: colours and a live bar on a terminal, else plain lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from mstar_tp.tools.check.render import Line, Page

STYLES = {"": "", "bad": "bold red", "good": "bold green", "note": "yellow", "head": "bold"}
WORTH_TELLING = 100
"""Fewer adapters than this are checked before anybody asks how far they are."""
REPORTS = 10


def page(*, everything: bool) -> Page:
    """The page's layout: as wide as the terminal; a pipe gets every character."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Page(width, everything)


def show(lines: Sequence[Line]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(line.text, style=STYLES[line.style]))


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, total), from one thread; it writes to stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if total < WORTH_TELLING:
        yield lambda done, total: None
    elif console.is_terminal:
        columns = (TextColumn("checking adapters"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, total: bar.update(task, completed=done)
    else:

        def told(done: int, total: int) -> None:
            if done * REPORTS // total != (done - 1) * REPORTS // total:
                console.print(f"checked {done} of {total} adapters", markup=False)

        yield told
