"""Which configurations of the lockstep model are explored, and how each refuted variant shows."""

from __future__ import annotations

from dataclasses import replace

from model_config import FAILED, OTHER, Config

OPEN = (("new", "A"), ("new", "B"), ("new", "A"))
"""Three requests over two adapters."""
OPEN_THREE = (("new", "A"), ("new", "B"), ("new", "C"))
ABORT = (("abort", 0),)
RELOAD = (("unload", "A"), ("load", "A"), ("commit", "A"))
"""The name again, as another adapter: the third request may be on either."""

SMALL = Config(programs=(OPEN, ABORT))
FULL = Config(programs=(OPEN, ABORT, RELOAD))
"""Both with a read that may fail, any read on any rank, and two steps in flight."""

TESTED = {
    "capacity 2, slot 1, no fault": replace(FULL, capacity=2, faults=0),
    "3 ranks, capacity 1, slot 1": replace(FULL, ranks=3),
    "3 ranks, capacity 1, slots 2": replace(FULL, ranks=3, slots=2),
    "3 ranks, capacity 2, slot 1, no reload": replace(SMALL, ranks=3, capacity=2),
    "3 ranks, capacity 2, slots 2, no reload": replace(SMALL, ranks=3, capacity=2, slots=2),
    "bounded waits": replace(SMALL, capacity=2, steps=(2, 1, 1), bound=3),
    "bounded waits, three adapters": replace(
        SMALL, programs=(OPEN_THREE, ABORT), names="ABC", capacity=3, bound=2, faults=0
    ),
    "one step in flight": replace(FULL, window=1),
    "turns only when woken": replace(SMALL, wakes=True),
    "turns only when woken, one step in flight": replace(SMALL, wakes=True, window=1, capacity=2),
    "early reads": replace(SMALL, early=True),
    "early reads, reload": replace(FULL, programs=(OPEN[:2], RELOAD), steps=(1, 1), early=True),
    "other weights on one rank": replace(SMALL, wrong=(FAILED, OTHER), capacity=2),
    "two faults": replace(SMALL, faults=2),
    "held at start": replace(SMALL, held=1, capacity=2),
    "three adapters, the second leaves": replace(
        SMALL, programs=(OPEN_THREE, (("abort", 1),)), names="ABC", capacity=2, slots=2
    ),
    "one that fits past one that does not": replace(
        SMALL,
        programs=(OPEN_THREE, ABORT),
        names="CAB",
        costs=(1, 2, 3),
        capacity=3,
        slots=2,
        held=1,
    ),
    "costs 1 and 2": replace(SMALL, capacity=2, costs=(1, 2)),
    "the first request runs two steps": replace(SMALL, steps=(2, 1, 1), slots=2),
    "ends known by count": replace(SMALL, steps=(2, 1, 1), by_count=True),
    "misses agreed while reading": replace(
        SMALL, variant="admit before copies", may_wait=True, reduce=True
    ),
}
"""What the tests explore. What two ranks may do, two of three may, so a case is not explored with
both. The last takes R7 away: R6 alone must still keep the tables equal."""

DEEP = {
    **{
        f"{ranks} ranks, window {window}, capacity {capacity}, slots {slots}": replace(
            FULL, ranks=ranks, window=window, capacity=capacity, slots=slots
        )
        for ranks in (2, 3)
        for window in (1, 2)
        for capacity in (1, 2)
        for slots in (1, 2)
    },
    "turns only when woken": replace(FULL, wakes=True, capacity=2),
    "early reads": replace(FULL, early=True),
    "early reads, capacity 2": replace(SMALL, early=True, capacity=2),
    "other weights on one rank": replace(FULL, wrong=(FAILED, OTHER)),
    "two faults": replace(FULL, faults=2),
    "4 requests": replace(
        SMALL, programs=((*OPEN, ("new", "B")), (("abort", 1),)), steps=(1,) * 4, capacity=2
    ),
    "2 aborts, 2 steps each": replace(
        SMALL, programs=(OPEN, ABORT, (("abort", 2),)), steps=(2, 2, 2), slots=2
    ),
    "no reductions": replace(FULL, reduce=False, window=1),
}

REFUTED = {
    "remove on arrival": (replace(SMALL, programs=(OPEN,), faults=0), "equal tables"),
    "no fence": (replace(SMALL, programs=(OPEN,), faults=0), "fence"),
    "no advance": (replace(SMALL, programs=(OPEN,), faults=0), "no dead end"),
    "tier when a read lands": (
        replace(SMALL, programs=(OPEN,), faults=0, capacity=2),
        "equal tables",
    ),
    "tier looks at slots": (replace(SMALL, programs=(OPEN,), faults=0, capacity=2), "equal tables"),
    "keep without prefix": (replace(SMALL, programs=(OPEN,), faults=0), "oldest first"),
    "no fetch numbers": (replace(SMALL, programs=(OPEN,)), "no step waits for a read"),
    "retry before the failure": (replace(SMALL, programs=(OPEN,)), "equal tables"),
    "unload unfenced": (replace(FULL, programs=(OPEN[:2], ABORT, RELOAD), faults=0), "fence"),
    "slots counted by rows": (replace(SMALL, programs=(OPEN,), faults=0), "no slot idle"),
    "no agreement": (replace(SMALL, programs=(OPEN,), may_wait=True), "equal tables"),
    "admit before copies": (replace(SMALL, programs=(OPEN,)), "no step waits for a read"),
}
"""Variant -> where it is explored, and the invariant it breaks first."""


def refuted(name: str) -> tuple[Config, str]:
    """The configuration that shows what is wrong with a variant, and the invariant it breaks."""
    config, broken = REFUTED[name]
    return replace(config, variant=name), broken
