"""Promise: a step reads the adapters that its rows were given, whatever the device runs first; and
adapters under way keep their memory. Each wait that is left out shows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.adapter_kit import load
from support.copy_stress import SPEC, StressDevice, numbered, wrong_steps
from support.fake_queues import FakeQueues

from mstar_tp.lora.device.device_copies import DeviceEvent, OneQueue, SlotCopies, land
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter

SEEDS = range(12)


def stress(seed: int) -> int:
    """How many steps of a storm over queues of this seed are wrong."""
    queues = FakeQueues(seed)
    on = StressDevice(
        device=torch.device("cpu"),
        queues=queues,
        backend="torch",
        launch=queues.launch,
        passes=queues.some_time_passes,
        finish=queues.finish,
    )
    return wrong_steps(on, seed)


class _Nowhere(deque[tuple[DeviceEvent, object]]):
    def append(self, item: tuple[DeviceEvent, object]) -> None:
        """Keeps nothing."""


def keep_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SlotCopies.__init__

    def init(self: SlotCopies, queues: FakeQueues) -> None:
        made(self, queues)
        self._moving = _Nowhere()

    monkeypatch.setattr(SlotCopies, "__init__", init)


def leave_out(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def leave(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeQueues, name, lambda self, event: None)

    return leave


def test_steps_read_what_their_rows_were_given_whatever_runs_first() -> None:
    assert sum(stress(seed) for seed in SEEDS) == 0


@pytest.mark.parametrize(
    "spoil",
    [leave_out("copies_wait_for"), leave_out("steps_wait_for"), keep_no_source],
    ids=["copies wait for no step", "steps wait for no copy", "nothing is kept for a copy"],
)
def test_each_of_the_waits_is_needed(
    spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    assert sum(stress(seed) for seed in SEEDS) > 0


class _Watched(OneQueue):
    """Copies that never end; which of its calls wait."""

    def __init__(self) -> None:
        self.ended = False
        self.waits: list[str] = []

    def mark_copies(self) -> DeviceEvent:
        return self

    mark_steps = mark_copies

    def done(self) -> bool:
        return self.ended

    def copies_wait_for(self, event: DeviceEvent) -> None:
        self.waits.append("copies")

    def steps_wait_for(self, event: DeviceEvent) -> None:
        self.waits.append("steps")


def test_only_what_touches_the_slot_waits_and_no_wait_is_twice() -> None:
    queues, source = _Watched(), object()
    copies = SlotCopies(queues)

    def step(*slots: int) -> list[str]:
        queues.waits.clear()
        copies.reads(slots)
        copies.launched()
        return list(queues.waits)

    def install(slot: int) -> list[str]:
        queues.waits.clear()
        with copies.into(slot, source):
            pass
        return list(queues.waits)

    assert install(1) == [] and install(2) == []
    assert step(3) == [] and step() == [], "a step on other slots waits for nothing"
    assert step(1, 3) == ["steps"] and step(1) == [], "the queue has waited already"
    assert install(1) == ["copies"] and install(4) == [], "no step has read the slot"
    queues.ended = True
    assert step(1, 2) == [] and install(3) == [], "what is over is not waited for"


def test_an_adapter_is_let_go_when_its_copy_has_ended() -> None:
    queues, source = _Watched(), numbered(SPEC, 1)
    copies, gone = SlotCopies(queues), weakref.ref(source)
    with copies.into(1, source):
        pass
    del source
    copies.reap()
    assert gone() is not None, "the device may still read it"
    queues.ended = True
    copies.reap()
    assert gone() is None


def test_both_factors_of_a_target_are_moved_by_one_transfer(tmp_path: Path) -> None:
    spec = tiny_spec(layers=2, max_rank=4)
    copy = load(write_adapter(tmp_path, q_pairs(spec)), spec=spec)
    a, b = copy.a["self_attn.qkv_proj"], copy.b["self_attn.qkv_proj"].transpose(1, 2)
    assert a.any() and b.any()
    slots_a, slots_b = (torch.zeros(t.shape[0], 3, *t.shape[1:]) for t in (a, b))
    cpu = torch.device("cpu")
    assert land([(slots_a[:, 1], a), (slots_b[:, 1], b)], cpu) == 1
    assert torch.equal(slots_a[:, 1], a) and torch.equal(slots_b[:, 1], b)
    assert not slots_a[:, ::2].any() and not slots_b[:, ::2].any()
    apart, out = torch.ones(3, 2), torch.zeros(2, 3)
    assert land([(slots_a[:, 0], a), (out, apart.t())], cpu) == 2
    assert torch.equal(out, apart.t()) and torch.equal(slots_a[:, 0], a)
