"""Memory for CPU copies: never more than the capacity, first come, first served, and given back
when a copy is really gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from mstar_tp.engine.resources.lora.cpu_cache.memory_budget import CpuCacheBudget
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.wire.values import AdapterKey


def never() -> bool:
    return False


def adapter() -> LoadedAdapter:
    tensors = {"q": torch.zeros(4)}
    return LoadedAdapter(
        key=AdapterKey("p", 1), digest="d", lora_rank=1, scaling={}, a=tensors, b=tensors
    )


class Taker:
    """A reader thread that takes ``cost``; ``turn`` is set once it waits its turn."""

    def __init__(
        self,
        budget: CpuCacheBudget,
        cost: int,
        cancelled: Callable[[], bool] = never,
        name: str = "",
    ) -> None:
        self.took: SimpleQueue[bool] = SimpleQueue()
        self.waits = threading.Event()

        def looked() -> bool:
            self.waits.set()
            return cancelled()

        def run() -> None:
            self.took.put(budget.take(cost, cost, looked))

        threading.Thread(target=run, daemon=True, name=name).start()
        assert self.waits.wait(30)


def test_a_read_waits_until_there_is_room_and_none_overtakes_it() -> None:
    budget = CpuCacheBudget(4)
    assert budget.take(3, 3, never)
    large = Taker(budget, 3)
    small = Taker(budget, 1)
    assert large.took.empty() and small.took.empty(), "1 would fit, but 3 came first"
    budget.give(3, 3)
    assert large.took.get(timeout=30) and small.took.get(timeout=30)
    assert budget.peak == 4 and budget.memory_bytes == 4


def test_a_read_that_nobody_wants_any_more_leaves_its_turn_to_the_next() -> None:
    budget = CpuCacheBudget(1)
    assert budget.take(1, 1, never)
    unwanted = threading.Event()
    first = Taker(budget, 1, unwanted.is_set)
    second = Taker(budget, 1)
    unwanted.set()
    budget.nudge()
    assert first.took.get(timeout=30) is False
    budget.give(1, 1)
    assert second.took.get(timeout=30) is True
    assert budget.peak == 1


def test_room_comes_back_when_the_last_reference_to_a_copy_goes() -> None:
    budget = CpuCacheBudget(1)
    assert budget.take(1, 32, never)
    copy = adapter()
    budget.give_with(copy, 1, 32)
    installing = [copy]
    del copy
    waiting = Taker(budget, 1)
    assert waiting.took.empty() and budget.memory_bytes == 32, "an install still copies from it"
    installing.clear()
    assert waiting.took.get(timeout=30)
    assert budget.memory_bytes == 1 and budget.peak_bytes == 32
