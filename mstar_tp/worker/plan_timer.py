"""The time at which the leader plans the step behind one that runs.

It is late enough that a request which arrives meanwhile is in it, early enough that the step thread
finds it when it is done.

Only the leader asks, and what it plans is announced like any other step, so nothing that ranks
decide by themselves depends on the clock here. Main thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

KEPT = 4
"""Durations remembered of each kind of step; the shortest counts."""
LEAD_S = 0.002
LEAD_SHARE = 0.1
"""A step is planned this long, and this share of its duration, before the running one ends."""
SHORT_S = 0.02
"""The length below which the next step is planned at once, while the main thread is awake.

To wake it once more costs the step more than the wait costs a request.
"""


class PlanTimer(Protocol):
    """``num_tokens`` is what says how long a step takes: its tokens, prompts' and sampled."""

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step of this size took this long from its launch to its end."""
        ...

    def wait_s(self, num_tokens: int, launched_at: float) -> float | None:
        """Return the seconds until the step behind one of this size is to be planned.

        It is 0 when it is now, None when that one's end is to be waited for.
        """
        ...


class ImmediatePlanTimer:
    """Plans as soon as it may."""

    def note(self, num_tokens: int, duration_s: float) -> None:
        """Nothing depends on it."""

    def wait_s(self, num_tokens: int, launched_at: float) -> float | None:
        return 0.0


class StepEndPlanTimer:
    """A timer that plans shortly before the running step should end.

    It goes by how long such steps took of late; when they are short, it plans at once.

    Behind a step of a size not seen yet it waits for the end, as if there were no overlap.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._took: dict[int, deque[float]] = {}

    def note(self, num_tokens: int, duration_s: float) -> None:
        kind = num_tokens.bit_length()
        self._took.setdefault(kind, deque(maxlen=KEPT)).append(duration_s)

    def wait_s(self, num_tokens: int, launched_at: float) -> float | None:
        took = self._took.get(num_tokens.bit_length())
        if took is None:
            return None
        shortest = min(took)
        if shortest < SHORT_S:
            return 0.0
        due = launched_at + shortest - LEAD_S - LEAD_SHARE * shortest
        return max(0.0, due - self._clock())
