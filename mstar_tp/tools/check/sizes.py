"""Bytes that the serving code's own objects hold, built on the meta device. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mstar_tp.kernels.linear_weight import can_pack
from mstar_tp.layers.embedding import ParallelHead
from mstar_tp.lora.device.slot_weights import SlotWeights
from mstar_tp.lora.spec import LoraSpec

META = torch.device("meta")


def held_bytes(root: object) -> int:
    """Bytes of every tensor that ``root`` holds, however deep; shared memory counts once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(root, set()):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())


def slot_bytes(spec: LoraSpec, rank: int, world_size: int, dtype: torch.dtype) -> int:
    """All slots of one rank."""
    return held_bytes(SlotWeights(spec, rank=rank, world_size=world_size, device=META, dtype=dtype))


def packing_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """The bytes that packing for CPU GEMMs adds to a rank's weights: a tied head's own copy."""
    if not can_pack(dtype):
        return 0
    heads = (module for module in model.modules() if isinstance(module, ParallelHead))
    return sum(
        head.shard.size * head.hidden_size * dtype.itemsize for head in heads if head.is_tied
    )


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner: list[object] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif type(value).__module__.startswith(("mstar_tp.", "torch.nn.")):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [getattr(value, name) for name in slots if hasattr(value, name)]
        inner += list(getattr(value, "__dict__", {}).values())
    else:
        return
    for each in inner:
        yield from _tensors(each, seen)
