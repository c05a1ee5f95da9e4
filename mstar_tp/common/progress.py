"""The progress of a long command, on stderr: one live line on a terminal, else a line a quarter."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from mstar_tp.common.units import in_bytes


class ByteProgress:
    """``with ByteProgress("merging", total) as progress``; then ``progress.add(num_bytes)``."""

    def __init__(self, verb: str, total_bytes: int) -> None:
        self._verb, self._total, self._done = verb, total_bytes, 0
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = self._console.status(self._text())
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        before, self._done = self._done, self._done + num_bytes
        if self._live is not None:
            self._live.update(self._text())
        elif self._done * 4 // max(1, self._total) != before * 4 // max(1, self._total):
            self._console.print(self._text(), markup=False)

    def _text(self) -> str:
        return escape(f"{self._verb} {in_bytes(self._done)} of {in_bytes(self._total)}")
