"""Times of small pieces of work, taken in turn so that a neighbour's load falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def seconds_in_turn(
    work: Mapping[str, Work], repeats: int, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds of each piece of work, ``repeats`` times, one after the other.

    A first round is not counted. ``inner`` calls make one time, which is of one call.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, run in work.items():
            begin = time.perf_counter()
            for _ in range(inner):
                run()
            if turn:
                taken[name].append((time.perf_counter() - begin) / inner)
    return taken
