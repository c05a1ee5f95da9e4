"""The weights that each name may answer with at a moment: a record of when it served which.

Plain data. Times are one clock's seconds. While a change is under way a name may answer as before
or as after it; once it is settled, only as after it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

KEPT_S = 600.0
"""Older history answers for no request any more."""


@dataclass(slots=True)
class Life:
    """A stretch of time in which a name may have served ``weights`` (None: nothing)."""

    weights: str | None
    since: float
    until: float = math.inf


@dataclass(slots=True)
class Name:
    """One name that adapters are loaded under. Whoever changes it or its files holds ``lock``."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    folder: Path | None = None
    """The folder that the adapter it serves was loaded from."""
    lives: list[Life] = field(default_factory=list)
    faults: list[Life] = field(default_factory=list)
    """The times when reading its adapter may have failed."""

    @property
    def weights(self) -> str | None:
        """The weights that it serves, as far as the last settled change says."""
        return self.lives[-1].weights

    @property
    def troubled(self) -> bool:
        return bool(self.faults) and self.faults[-1].until == math.inf

    def begin(self, now: float, *weights: str | None) -> None:
        """Note that from now on it may come to serve any of ``weights`` instead."""
        self.lives += [Life(one, now) for one in weights]

    def settle(self, now: float, weights: str | None) -> None:
        """The change is over: it serves ``weights``, and nothing else, from now on."""
        _end(self.lives, now)
        self.lives = [life for life in self.lives if life.until > now - KEPT_S]
        self.lives.append(Life(weights, now))

    def begin_fault(self, now: float) -> None:
        """Note that from now on its reads may fail."""
        if not self.troubled:
            self.faults.append(Life(None, now))

    def end_fault(self, now: float) -> None:
        """A request that is sent later than now has no reason to fail."""
        _end(self.faults, now)
        self.faults = [one for one in self.faults if one.until > now - KEPT_S]

    def could_serve(self, start: float, end: float) -> set[str | None]:
        """The weights that a request may have been resolved to, sent and resolved in this time."""
        return {life.weights for life in _within(self.lives, start, end)}

    def could_fail(self, start: float, end: float) -> bool:
        """True if a request that lived in this time may have failed."""
        return bool(_within(self.faults, start, end))


def _end(lives: list[Life], now: float) -> None:
    for life in lives:
        life.until = min(life.until, now)


def _within(lives: list[Life], start: float, end: float) -> list[Life]:
    return [life for life in lives if life.since <= end and life.until >= start]
