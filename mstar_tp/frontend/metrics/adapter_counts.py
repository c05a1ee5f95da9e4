"""Requests and tokens by adapter, in a bounded number of series. The event loop's thread.

Thousands of adapters may be served, and others loaded and unloaded all the time; a metrics store
keeps a series for every name it ever saw. So only the most used adapters have a series of their
own; all others count together as ``OTHER``. Sums over all series never go down: an adapter that
gets a series begins at 0, and the counts of the one before it move to ``OTHER``.

Every ``REVIEW_INTERVAL`` requests the uses are compared again; then few series are given to others,
and only to adapters that are used much and twice as often. So a long tail makes no series.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from mstar_tp.frontend.metrics.outcomes import Outcome

BASE = "base"
"""The label of requests that name no adapter."""
OTHER = "other"
"""The label of adapters without a series. Adapters of these two names never have one."""
REVIEW_INTERVAL = 1024
"""The requests between two comparisons of how much adapters are used."""
LEAST_SHARE = 4
"""A series goes only to an adapter with this part of an even share of all requests."""
MOVES = 8
"""The most series that go to other adapters at one comparison."""


@dataclass(slots=True)
class AdapterCounts:
    """The counts of one label."""

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def add(self, other: AdapterCounts) -> None:
        """Add the counts of another label to these."""
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] += count
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens


class AdapterSeries:
    """The counts of every label; at most ``max_series`` adapters have one of their own."""

    def __init__(self, max_series: int) -> None:
        self._max_series = max_series
        self._base = AdapterCounts()
        self._other = AdapterCounts()
        self._with_series: dict[str, AdapterCounts] = {}
        self._uses: dict[str, float] = {}
        """adapter -> its uses, of which the newest count most; forgotten adapters are gone."""
        self._until_review = REVIEW_INTERVAL

    def counts(self, adapter: str | None) -> AdapterCounts:
        """Return the counts that ``adapter`` adds to now; None is the base."""
        if adapter is None:
            return self._base
        return self._with_series.get(adapter, self._other)

    def used(self, adapter: str | None) -> None:
        """Note that a request on ``adapter`` was taken."""
        if adapter is None or adapter in (BASE, OTHER):
            return
        self._uses[adapter] = self._uses.get(adapter, 0.0) + 1.0
        if len(self._with_series) < self._max_series and adapter not in self._with_series:
            self._with_series[adapter] = AdapterCounts()
        self._until_review -= 1
        if not self._until_review:
            self._until_review = REVIEW_INTERVAL
            self._review()

    def keep(self, known: Callable[[str], bool]) -> None:
        """End the series of adapters that are not ``known`` any more."""
        for adapter in [name for name in self._uses if not known(name)]:
            del self._uses[adapter]
        for adapter in [name for name in self._with_series if not known(name)]:
            self._end_series(adapter)

    def with_series(self) -> list[str]:
        """Return the adapters that have a series, sorted."""
        return sorted(self._with_series)

    def labelled(self) -> list[tuple[str, AdapterCounts]]:
        """Return every label and its counts; the base and the other adapters are always there."""
        return [(BASE, self._base), *sorted(self._with_series.items()), (OTHER, self._other)]

    def _end_series(self, adapter: str) -> None:
        counts = self._with_series.pop(adapter, None)
        if counts is not None:
            self._other.add(counts)

    def _review(self) -> None:
        """Give series of the least used adapters to the most used of those without one."""
        uses = self._uses
        waiting = (name for name in uses if name not in self._with_series)
        best = heapq.nlargest(MOVES, waiting, key=lambda name: (uses[name], name))
        worst = heapq.nsmallest(
            MOVES, self._with_series, key=lambda name: (uses.get(name, 0.0), name)
        )
        for newcomer, holder in zip(best, worst, strict=False):
            least = max(
                2 * uses.get(holder, 0.0), REVIEW_INTERVAL / (LEAST_SHARE * self._max_series), 2.0
            )
            if uses[newcomer] < least:
                break
            self._end_series(holder)
            self._with_series[newcomer] = AdapterCounts()
        self._uses = {name: count / 2 for name, count in uses.items() if count > 1 / 64}
