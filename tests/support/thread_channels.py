"""The two channels between frontend, leader and followers, in memory.

A message arrives when a test says so, in order on its own channel and in any order with those of
others.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from mstar_tp.wire.commands import ConductorMessage
from mstar_tp.wire.reports import CopyIn, RankReport
from mstar_tp.wire.schedule import ScheduleEntry
from support.interleaving import InterleavedWaker

T = TypeVar("T")


class Wire(Generic[T]):
    """One direction of one channel: first in, first out. ``waker`` is its receiver's."""

    def __init__(self, name: str, waker: InterleavedWaker | None = None) -> None:
        self.name = name
        self._waker = waker
        self._under_way: deque[T] = deque()
        self._arrived: deque[T] = deque()

    def __len__(self) -> int:
        """Messages under way."""
        return len(self._under_way)

    def ready(self) -> bool:
        """True if ``take`` has something: a poller asks it."""
        return bool(self._arrived)

    def send(self, message: T) -> None:
        self._under_way.append(message)

    def arrive(self) -> None:
        """The oldest message under way arrives."""
        self._arrived.append(self._under_way.popleft())

    def take(self) -> list[T]:
        taken = list(self._arrived)
        self._arrived.clear()
        return taken


class RankLink:
    """A rank's end of the conductor channel."""

    lost: str | None = None

    def __init__(self, commands: Wire[ConductorMessage], reports: Wire[RankReport]) -> None:
        self.poll_socket = commands
        self._reports = reports

    def receive(self) -> list[ConductorMessage]:
        return self.poll_socket.take()

    def send(self, report: RankReport) -> None:
        self._reports.send(report)


class FollowerSchedule:
    """A follower's end of the schedule channel."""

    lost: str | None = None

    def __init__(self, entries: Wire[ScheduleEntry], copies: Wire[CopyIn]) -> None:
        self.poll_socket = entries
        self._copies = copies

    def receive(self) -> list[ScheduleEntry]:
        return self.poll_socket.take()

    def send(self, report: CopyIn) -> None:
        self._copies.send(report)


class LeaderSchedule:
    """The leader's end of the schedule channel; ``poll_socket`` is itself."""

    lost: str | None = None

    def __init__(self, entries: list[Wire[ScheduleEntry]], copies: list[Wire[CopyIn]]) -> None:
        self._entries = entries
        self._copies = copies

    @property
    def poll_socket(self) -> LeaderSchedule:
        return self

    def ready(self) -> bool:
        return any(wire.ready() for wire in self._copies)

    def broadcast(self, entry: ScheduleEntry) -> None:
        for wire in self._entries:
            wire.send(entry)

    def receive(self) -> list[tuple[int, CopyIn]]:
        return [(report.rank, report) for wire in self._copies for report in wire.take()]
