"""A step's tables reach the device by copies that no later step's filling can reach."""

from __future__ import annotations

import pytest
import torch

from mstar_tp.kernels.staging import StagedTable, to_device


class LateCopies:
    """A stream whose copies end only when somebody waits for the event behind them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class Event:
    def __init__(self) -> None:
        self.pending = False
        self.waits = 0

    def record(self) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.waits += 1
        self.pending = False


def test_a_buffer_is_filled_again_only_once_its_last_copy_has_ended() -> None:
    stream = LateCopies()
    table = StagedTable(torch.zeros(3, dtype=torch.int32), stream.event)
    for step in range(4):
        running = [event for event in stream.events if event.pending]
        table.write(torch.full((3,), step, dtype=torch.int32))
        assert table.table.tolist() == [step] * 3
        # The copy of the step before may still run; that of the one before it has been waited for.
        assert [event for event in running if not event.pending] == []
        assert len(stream.events) == min(step + 1, 2)
    assert [event.waits for event in stream.events] == [1, 1]


def test_values_go_to_a_gpu_from_pinned_memory_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        asked.append("pinned")
        return self

    def to(self: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append((device, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu = torch.device("cuda", 1)
    assert to_device([3, 4], torch.int64, gpu).tolist() == [3, 4]
    assert asked == ["pinned", (gpu, True)]


def test_a_table_that_is_written_once_has_one_buffer() -> None:
    stream = LateCopies()
    StagedTable(torch.zeros(2), stream.event).write(torch.ones(2))
    assert len(stream.events) == 1
