"""What a run of the lockstep model is about: its configuration, and what all its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

READING, IN, OTHER, FAILED = "reading", "in", "other", "failed"
"""How far a copy is on one rank; OTHER: in, with weights that no other rank has."""

VARIANTS = {
    "remove on arrival": "a remove is applied when it arrives, not at its place in the order",
    "no fence": "a remove does not wait for the admit of the step before it",
    "no advance": "the leader says nothing while no other entry follows",
    "tier when a read lands": "what the CPU cache holds is decided as reads land",
    "tier looks at slots": "an adapter that sits in a slot is not held for a new request",
    "keep without prefix": "the adapter of every live request is kept, not the prefix that fits",
    "no fetch numbers": "a report counts for whatever hold of the adapter there is",
    "retry before the failure": "a rank whose read failed reads anew at the next ingest",
    "unload unfenced": "an unload forgets the adapter's slot at its own place",
    "slots counted by rows": "a reservation takes a slot a row, not a slot an adapter",
    "no agreement": "the leader admits on its own copy, each rank by its own reads",
    "admit before copies": "the leader admits on its own copy; misses are agreed",
}
"""Refuted variants of the protocol -> what is different in them."""


class ViolationError(Exception):
    """An invariant does not hold: which, and what was seen."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One instance with its clients. ``programs`` are what the conductor sends, each in its order
    and all interleaved in every way: ("new", name), ("abort", request), ("unload", name),
    ("load", name), ("commit", name).

    ``costs`` in the CPU cache, by adapter (loads get the numbers after those of ``names``): else 1
    each. ``steps``: how many steps each request runs. ``faults``: reads that may go wrong, any read
    on any rank, and ``wrong``: how. ``early``: followers may read before a body is ordered.
    ``wakes``: the leader's loop turns only when something woke it, not whenever it likes.
    ``by_count``: it knows beforehand when a request ends. ``may_wait``: go on when a step waits for
    a read. ``bound``: the most steps from a row's joining to its remove; if given, waits for a slot
    are counted. ``held``: adapters that are held from the start. ``reduce``: see
    ``model_reductions``; by default unless there is a ``variant``.
    """

    ranks: int = 2
    capacity: int = 1
    costs: tuple[int, ...] = ()
    slots: int = 1
    window: int = 2
    programs: tuple[tuple[tuple[str, Any], ...], ...]
    steps: tuple[int, ...] = (1, 1, 1)
    faults: int = 1
    wrong: tuple[str, ...] = (FAILED,)
    early: bool = False
    wakes: bool = False
    by_count: bool = False
    may_wait: bool = False
    bound: int = 0
    held: int = 0
    names: str = "AB"
    variant: str | None = None
    reduce: bool | None = None


Method = TypeVar("Method", bound=Callable[..., Any])


def kept(method: Method) -> Method:
    """Compute each answer of a pure method once."""

    @wraps(method)
    def answer(self: Any, *arguments: Any) -> Any:
        known = self.known[method]
        try:
            return known[arguments]
        except KeyError:
            value = known[arguments] = method(self, *arguments)
            return value

    return answer  # type: ignore[return-value]


def bits(mask: int) -> list[int]:
    """The members of a mask, ascending."""
    return [index for index in range(mask.bit_length()) if mask >> index & 1]
