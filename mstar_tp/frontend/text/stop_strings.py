"""Finds stop strings in text that arrives in pieces, and holds back what may still become one."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    text: str
    """May be shown now."""
    stopped: bool
    """A stop string matched: ``text`` is the last of the answer."""


class StopStrings:
    """Cuts one answer at the first stop string to be complete, wherever the pieces' borders fall.

    Of two that are complete at the same character, the longer wins.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """``stops``: not empty strings. ``include``: the stop string itself stays in the text."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest_open = max(map(len, stops), default=1) - 1
        self._first_chars = frozenset(stop[0] for stop in stops)

    def push(self, text: str) -> Piece:
        if not self._stops:
            return Piece(text, False)
        buffer = self._held + text
        end, start = self._first_match(buffer)
        if end >= 0:
            self._held = ""
            return Piece(buffer[: end if self._include else start], True)
        keep = self._open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Piece(buffer[: len(buffer) - keep], False)

    def finish(self) -> str:
        """Return what was held: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int]:
        found = (-1, -1)
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                match = (start + len(stop), start)
                found = match if found[0] < 0 else min(found, match)
        return found

    def _open_suffix(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins a stop string."""
        for start in range(max(0, len(buffer) - self._longest_open), len(buffer)):
            if buffer[start] in self._first_chars:
                end = buffer[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return len(end)
        return 0
