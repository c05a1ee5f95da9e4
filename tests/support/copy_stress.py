"""Installs and steps in a random order, each step checked for the adapters that it read."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mstar_tp.lora.device.delta_plan import DeltaPlan
from mstar_tp.lora.device.device_copies import DeviceQueues
from mstar_tp.lora.device.slot_weights import Backend, SlotWeights
from mstar_tp.lora.device.target_weights import LayerWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.wire.values import AdapterKey

SPEC = tiny_spec(slots=3, max_rank=2)
INSTALLS_AND_STEPS = 40


def numbered(spec: LoraSpec, number: int, page_locked: bool = False) -> LoadedAdapter:
    """An adapter whose delta of ones tells its number; its memory is used again once it is gone."""
    a, b = {}, {}
    for target in spec.targets:
        a_shape, b_shape = slot_shapes(spec, target, 0, 1)
        a[target.name] = torch.full(a_shape, 1.0 / a_shape[-1], pin_memory=page_locked)
        b[target.name] = torch.full(b_shape, number / spec.max_rank, pin_memory=page_locked)
    adapter = LoadedAdapter(
        key=AdapterKey(str(number), 1), digest="", lora_rank=spec.max_rank, scaling={}, a=a, b=b
    )

    def reuse() -> None:
        for tensor in (*a.values(), *b.values()):
            tensor.fill_(torch.nan)

    weakref.finalize(adapter, reuse)
    return adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class StressDevice:
    """The device that a stress run uses.

    ``launch`` takes part of a step, ``passes`` is called between any two things, ``finish`` once,
    to end all work.
    """

    device: torch.device
    queues: DeviceQueues
    backend: Backend
    launch: Callable[[Callable[[], None]], None]
    passes: Callable[[], None]
    finish: Callable[[], None]


def wrong_steps(on: StressDevice, seed: int) -> int:
    """The number of a stress run's steps that read other adapters than their rows were given."""
    weights = SlotWeights(
        SPEC,
        rank=0,
        world_size=1,
        device=on.device,
        dtype=torch.float32,
        backend=on.backend,
        queues=on.queues,
    )
    target, chooser = SPEC.targets[0], random.Random(seed)
    layer, x = weights.layer(target.name, 1), torch.ones(3, target.in_features, device=on.device)
    inside: dict[int, int] = {}
    steps: list[tuple[list[int], torch.Tensor]] = []
    for number in range(1, INSTALLS_AND_STEPS):
        if len(inside) < 3 or chooser.random() < 0.4:
            slot = chooser.randint(1, 3)
            adapter = numbered(SPEC, number, page_locked=on.device.type == "cuda")
            weights.install([(slot, adapter)])
            del adapter
            inside[slot] = number
        else:
            slots = [chooser.randint(0, 3) for _ in range(3)]
            plan = weights.plan(slots, [1] * 3)
            y = torch.zeros(3, target.out_features, device=on.device)
            on.launch(partial(_add, layer, y, x, plan))
            weights.launched()
            steps.append(([inside[slot] if slot else 0 for slot in slots], y))
        on.passes()
        weights.reap()
    on.finish()
    weights.reap()
    return sum(
        not torch.allclose(y.cpu(), torch.tensor(wanted).float()[:, None].expand_as(y))
        for wanted, y in steps
    )


def _add(layer: LayerWeights, y: torch.Tensor, x: torch.Tensor, plan: DeltaPlan) -> None:
    layer.add(y, x, plan)
