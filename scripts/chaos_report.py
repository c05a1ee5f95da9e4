"""The counters of a chaos run, and its violations."""

from __future__ import annotations

import asyncio
import collections
from dataclasses import dataclass, field

MAX_SHOWN = 20
WANTED = (
    "right", "stopped", "left", "not served", "failed", "loads", "unloads", "folders hidden",
    "slowed a rank's reads", "unloads that raced a load", "loads that raced each other",
)  # fmt: skip
"""The events that a run must have seen to mean anything."""


@dataclass(slots=True)
class Report:
    """The report: each violation is one sentence, and any of them fails the run."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    """The ends of requests, counted."""
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    """The actions on the server, counted."""
    violations: collections.Counter[str] = field(default_factory=collections.Counter)
    """kind -> how often."""
    details: list[str] = field(default_factory=list)
    stats: dict[str, object] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    """Latencies of whole answers by the base model, which no adapter change may hold up."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the ranks are known to be gone: there is nothing left to ask."""

    def violation(self, kind: str, text: str) -> None:
        self.violations[kind] += 1
        if len(self.details) < MAX_SHOWN:
            self.details.append(f"{kind}: {text}")

    def ranks_gone(self, cause: str) -> None:
        """The server says that it lost its ranks, and why: counted once."""
        if not self.gone.is_set():
            self.gone.set()
            self.violation("divergence" if "differs from the leader" in cause else "end", cause)

    def missing(self) -> list[str]:
        """The wanted events that have not happened yet."""
        return [kind for kind in WANTED if not self.ends[kind] and not self.events[kind]]

    @property
    def requests(self) -> int:
        return sum(self.ends.values())

    def print(self) -> None:
        print(f"requests: {self.requests}")
        _table("ends", self.ends)
        _table("done to the server", self.events)
        if self.latencies_s:
            ordered = sorted(self.latencies_s)
            p50, p99 = (ordered[int(len(ordered) * q)] for q in (0.5, 0.99))
            print(f"base answers: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
        for name, value in self.stats.items():
            print(f"{name}: {value}")
        kinds = ("wrong text", "divergence", "leak", "hang", "failure", "bound", "read wait", "end")
        print("found wrong: " + ", ".join(f"{self.violations[k]} {k}" for k in kinds))
        for detail in self.details:
            print(f"  {detail}")


def _table(title: str, counts: collections.Counter[str]) -> None:
    print(f"{title}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
