"""Readers take their share of a core while steps run, all of them together, and all of it else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapter_kit import SPEC

from mstar_tp.engine.resources.lora.cpu_cache.read_throttle import (
    BIT_S,
    PATIENCE_S,
    RECENT_S,
    SHARE,
    ReadThrottle,
)
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.testing.lora_files import q_pairs, write_adapter
from mstar_tp.wire.values import AdapterKey


class World:
    """One core: time passes as a reader works on it or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.slept: list[float] = []
        self.throttle = ReadThrottle(lambda: self.now, lambda: self.cpu, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.now += seconds


@pytest.fixture
def world() -> World:
    return World()


def test_while_steps_run_a_reader_works_for_its_share_of_the_time(world: World) -> None:
    rest, begun = world.throttle.reader(), world.now
    for _ in range(500):
        world.throttle.stepped()
        world.work(2 * BIT_S)
        rest()
    assert world.cpu / (world.now - begun) == pytest.approx(SHARE)


def test_two_readers_have_one_share_together(world: World) -> None:
    world.throttle.stepped()
    first, second = world.throttle.reader(), world.throttle.reader()
    world.cpu += 2 * BIT_S
    first()
    world.now -= world.slept[0]  # the other worked meanwhile
    second()
    assert world.slept[1] == pytest.approx(2 * world.slept[0])


def test_without_steps_a_reader_does_not_rest(world: World) -> None:
    rest = world.throttle.reader()
    world.work(1.0)
    rest()
    world.throttle.stepped()
    world.work(RECENT_S + 1)
    rest()
    assert world.slept == []


def test_a_read_that_goes_on_for_long_rests_no_more(world: World) -> None:
    rest, begun = world.throttle.reader(), world.now
    for _ in range(100_000):
        world.throttle.stepped()
        world.work(2 * BIT_S)
        rest()
    rested = sum(world.slept)
    assert PATIENCE_S / 2 < rested < PATIENCE_S + 1
    assert world.now - begun == pytest.approx(rested + world.cpu)


def test_waiting_for_a_disk_is_no_work_and_little_work_no_rest(world: World) -> None:
    rest = world.throttle.reader()
    world.throttle.stepped()
    world.now += RECENT_S / 2
    rest()
    world.work(BIT_S / 2)
    rest()
    assert world.slept == []
    world.work(BIT_S)
    rest()
    assert len(world.slept) == 1


def test_a_read_rests_between_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LoraAdapterStore(SPEC, 0, 1, page_locked=False, dtype=torch.float32)
    rests: list[None] = []
    monkeypatch.setattr(store.throttle, "reader", lambda: lambda: rests.append(None))
    store.read(AdapterKey("x", 1), str(write_adapter(tmp_path, q_pairs(SPEC))))
    assert len(rests) >= SPEC.targets[0].num_layers
