"""Promise: a step reads the adapters that its rows were given, whatever the device runs first; and
adapters under way keep their memory. Each wait that is left out shows.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable

import pytest
import torch

from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.device_copies import DeviceEvent, OneQueue, SlotCopies
from mstar_tp.lora.shards import slot_shapes
from mstar_tp.lora.slot_weights import SlotWeights
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.fake_queues import FakeQueues
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.wire.messages import AdapterKey

SPEC = tiny_spec(slots=3, max_rank=2)
NAME = SPEC.targets[0].name
SEEDS = range(12)


def numbered(spec: LoraSpec, number: int) -> LoadedAdapter:
    """An adapter whose delta of ones tells its number; its memory is used again once it is gone."""
    a, b = {}, {}
    for target in spec.targets:
        a_shape, b_shape = slot_shapes(spec, target, 0, 1)
        a[target.name] = torch.full(a_shape, 1.0 / a_shape[-1])
        b[target.name] = torch.full(b_shape, number / spec.max_rank)
    adapter = LoadedAdapter(
        key=AdapterKey(str(number), 1), digest="", rank=spec.max_rank, scaling={}, a=a, b=b
    )

    def reuse() -> None:
        for tensor in (*a.values(), *b.values()):
            tensor.fill_(torch.nan)

    weakref.finalize(adapter, reuse)
    return adapter


def wrong_steps(queues: FakeQueues, seed: int) -> int:
    """How many of a storm's steps read other adapters than their rows were given."""
    weights = SlotWeights(
        SPEC,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend="torch",
        queues=queues,
    )
    layer, chooser = weights.layer(NAME, 1), random.Random(seed)
    x, width = torch.ones(3, SPEC.targets[0].in_features), SPEC.targets[0].out_features
    inside: dict[int, int] = {}
    steps: list[tuple[list[int], torch.Tensor]] = []
    for number in range(1, 40):
        if len(inside) < 3 or chooser.random() < 0.4:
            slot = chooser.randint(1, 3)
            weights.install([(slot, numbered(SPEC, number))])
            inside[slot] = number
        else:
            slots = [chooser.randint(0, 3) for _ in range(3)]
            plan, y = weights.plan(slots, [1] * 3), torch.zeros(3, width)
            queues.launch(lambda y=y, plan=plan: layer.add(y, x, plan))  # type: ignore[misc]
            weights.launched()
            steps.append(([inside[slot] if slot else 0 for slot in slots], y))
        queues.some_time_passes()
        weights.reap()
    queues.finish()
    weights.reap()
    return sum(
        not torch.allclose(y, torch.tensor(wanted, dtype=torch.float32)[:, None].expand_as(y))
        for wanted, y in steps
    )


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
    assert sum(wrong_steps(FakeQueues(seed), seed) for seed in SEEDS) == 0


@pytest.mark.parametrize(
    "spoil",
    [leave_out("copies_wait_for"), leave_out("steps_wait_for"), keep_no_source],
    ids=["copies wait for no step", "steps wait for no copy", "nothing is kept for a copy"],
)
def test_each_of_the_waits_is_needed(
    spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    assert sum(wrong_steps(FakeQueues(seed), seed) for seed in SEEDS) > 0


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
