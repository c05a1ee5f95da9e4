"""A device whose two queues run as late, or as early, as their waits allow.

Work that is not ordered happens in the wrong order for some seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from mstar_tp.lora.device.device_copies import DeviceEvent


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


@dataclass(eq=False)
class _Queue:
    work: list[Callable[[], None] | DeviceEvent] = field(default_factory=list)
    """The work: functions to call, and events to wait for."""
    ran: int = 0

    def advance(self) -> bool:
        """Do the next piece of work; whether there was one that waits for nothing."""
        if self.ran == len(self.work):
            return False
        piece = self.work[self.ran]
        if callable(piece):
            piece()
        elif not piece.done():
            return False
        self.ran += 1
        return True


@dataclass(frozen=True)
class _Place:
    queue: _Queue
    position: int

    def done(self) -> bool:
        return self.queue.ran >= self.position


class FakeQueues:
    """``seed`` chooses how far each queue gets whenever ``some_time_passes``."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)
        self._copies, self._steps = _Queue(), _Queue()

    def launch(self, work: Callable[[], None]) -> None:
        """Queue part of a step."""
        self._steps.work.append(work)

    def copy(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._copies.work += [partial(_copy, to, source) for to, source in parts]

    def fill(self, to: torch.Tensor, value: float) -> None:
        def work() -> None:
            to.fill_(value)

        self._copies.work.append(work)

    def run(self, work: Callable[[], None]) -> None:
        self._copies.work.append(work)

    def mark_copies(self) -> DeviceEvent:
        return _Place(self._copies, len(self._copies.work))

    def mark_steps(self) -> DeviceEvent:
        return _Place(self._steps, len(self._steps.work))

    def copies_wait_for(self, event: DeviceEvent) -> None:
        self._copies.work.append(event)

    def steps_wait_for(self, event: DeviceEvent) -> None:
        self._steps.work.append(event)

    def some_time_passes(self) -> None:
        """Either queue gets some way, or none does."""
        for _ in range(self._chooser.choice([0, 0, 1, 5, 40])):
            self._chooser.choice([self._copies, self._steps]).advance()

    def finish(self) -> None:
        """All that was queued is done.

        Raises:
            AssertionError: the queues wait for each other.
        """
        while self._copies.advance() or self._steps.advance():
            pass
        for queue in (self._copies, self._steps):
            assert queue.ran == len(queue.work), "a queue waits for what never happens"
