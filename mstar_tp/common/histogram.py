"""Histograms as Prometheus keeps them, cheap enough to fill in every step. No torch.

One thread fills a histogram; any thread may read it. A reader may see an observation's count before
its share of the sum: both only ever grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

STEP_S = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 5.0),
)
"""Seconds of a step's phases: tens of microseconds to plan, seconds for a long prompt on CPUs."""
WAIT_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 2.0, 3.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Seconds until something comes: queue, prompt, first token."""
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Seconds between two tokens of one answer."""
WHOLE_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
"""Seconds of a whole answer."""
NUM_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
NUM_TOKENS = tuple(float(2**power) for power in range(18))


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """Observations a bucket (one more than there are bounds), and their sum."""

    counts: tuple[int, ...]
    sum: float


class Histogram:
    """``bounds``: the largest value of each bucket but the last, which takes what is larger."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Buckets:
        return Buckets(counts=tuple(self._counts), sum=self._sum)
