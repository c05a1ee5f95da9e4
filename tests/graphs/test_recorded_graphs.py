"""The fake for a device's graphs goes wrong, or refuses, wherever a real graph would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.recorded_graphs import RecordedGraphs
from support.thread_group import dispatch_flags_restored

from mstar_tp.engine.graphs.device import Graph

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(6.0)


@pytest.fixture
def capture(table: torch.Tensor) -> Iterator[Capture]:
    device = RecordedGraphs()
    with dispatch_flags_restored(), device.capturing():

        def record(forward: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
            try:
                device.begin()
                out = forward()
                return device.end(), out
            finally:
                device.abandon()

        yield record


def test_a_replay_reads_what_stands_at_its_places_now(
    capture: Capture, table: torch.Tensor
) -> None:
    graph, out = capture(lambda: table.view(2, 3)[:, 1:].neg().sum(1).mul_(2))
    table.copy_(torch.arange(6.0) * 10)
    graph.replay()
    assert out.tolist() == [-60.0, -180.0]


def test_a_number_of_the_capture_stands_still(capture: Capture, table: torch.Tensor) -> None:
    step = [2.0]
    graph, out = capture(lambda: table * step[0])
    step[0] = 5.0
    graph.replay()
    assert torch.equal(out, table * 2)


def test_a_tensor_that_a_step_makes_anew_is_refused(capture: Capture, table: torch.Tensor) -> None:
    of_this_step = table.clone()
    with pytest.raises(RuntimeError, match="does not stand still"):
        capture(lambda: table + of_this_step)


@pytest.mark.parametrize(
    "forward",
    [
        lambda table: table * table[0].item(),
        lambda table: table[table > 2],
        lambda table: table.index_put((table > 2,), table[0]),
        lambda table: table.nonzero(),
        lambda table: table + torch.tensor([1.0]),
        lambda table: table.long().bincount(),
    ],
)
def test_what_a_device_cannot_capture_is_refused(
    capture: Capture, table: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(RuntimeError, match="a graph cannot"):
        capture(lambda: forward(table))


def test_nothing_of_the_last_replay_is_left_for_the_next(
    capture: Capture, table: torch.Tensor
) -> None:
    graph, out = capture(lambda: torch.empty(6).add_(table))
    graph.replay()
    assert out.isnan().all(), "memory that nobody wrote must not look right"
