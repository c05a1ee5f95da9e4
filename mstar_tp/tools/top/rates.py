"""The changes between two readings. A server that was started again in between counts from 0."""

from __future__ import annotations

from mstar_tp.tools.top.polling import Reading


class Rates:
    """``before``: None where there is but one reading; then there are no rates."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self._now = now
        self._before = before
        self._seconds = 0.0 if before is None else now.at - before.at

    def grown(self, name: str, **labels: str) -> float | None:
        """The growth of a counter, or of all of its series with these labels."""
        if self._before is None:
            return None
        now, before = self._now.total(name, **labels), self._before.total(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float | None:
        """``grown`` a second."""
        grown = self.grown(name, **labels)
        return None if grown is None or self._seconds <= 0 else grown / self._seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """The mean of a histogram's observations in between; None without any."""
        count = self.grown(f"{name}_count", **labels)
        total = self.grown(f"{name}_sum", **labels)
        return total / count if count and total is not None else None

    def quantile(self, name: str, share: float) -> float | None:
        """The upper bound of the bucket that holds this share of a histogram's observations.

        None for no observations, infinite past all bounds. With one reading: of all observations
        ever.
        """
        before = {} if self._before is None else self._before.values(f"{name}_bucket", "le")
        now = self._now.values(f"{name}_bucket", "le")
        if any(count < before.get(bound, 0.0) for bound, count in now.items()):
            before = {}
        counts = {float(bound): count - before.get(bound, 0.0) for bound, count in now.items()}
        total = counts.get(float("inf"), 0.0)
        if not total:
            return None
        return next(bound for bound in sorted(counts) if counts[bound] >= share * total)
