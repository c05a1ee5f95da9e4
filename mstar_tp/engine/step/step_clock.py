"""The time that a step's phases take, and what it runs: counted on every rank. No torch.

Each rank counts for itself: no message, no collective, and one look at the clock a phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Literal

from mstar_tp.common.histogram import NUM_ROWS, NUM_TOKENS, STEP_S, Histogram
from mstar_tp.wire.stats import PhaseStats, StepStats

Phase = Literal[
    "schedule", "broadcast", "admit", "plan", "forward", "sample", "exchange", "wait", "commit"
]
LEADER_PHASES: tuple[Phase, ...] = ("schedule", "broadcast")
"""Phases of rank 0's main thread: it chooses a step's rows, and sends it to the followers."""
STEP_PHASES: tuple[Phase, ...] = (
    *("admit", "plan", "forward", "sample", "exchange", "wait", "commit"),
)
"""Phases of every rank's step thread.

``exchange`` brings the tokens from rank 0 to all; ``wait`` waits for a step that was launched on a
device. There, ``forward`` and ``sample`` are launches."""


class StepClock:
    """Times ``phases``; the thread that runs them owns it, any thread reads ``stats``."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._seconds: dict[Phase, Histogram] = {phase: Histogram(STEP_S) for phase in phases}
        self._rows = Histogram(NUM_ROWS)
        self._tokens = Histogram(NUM_TOKENS)
        self._since = 0.0

    def begin(self) -> None:
        """Begin a phase, the one whose ``lap`` comes next."""
        self._since = perf_counter()

    def lap(self, phase: Phase) -> None:
        """``phase`` is over, and the next one begins."""
        now = perf_counter()
        self._seconds[phase].observe(now - self._since)
        self._since = now

    def runs(self, num_rows: int, num_tokens: int) -> None:
        """A step is about to run."""
        self._rows.observe(num_rows)
        self._tokens.observe(num_tokens)

    def stats(self, other: StepClock | None = None) -> StepStats:
        """All that was counted; with ``other``, its phases first."""
        clocks = (self,) if other is None else (other, self)
        return StepStats(
            phases=tuple(
                PhaseStats(phase=phase, seconds=seconds.buckets())
                for clock in clocks
                for phase, seconds in clock._seconds.items()
            ),
            rows=self._rows.buckets(),
            tokens=self._tokens.buckets(),
        )
