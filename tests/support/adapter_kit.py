"""Loading hand-written adapters against the standard model, and reading the change they make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.base_weights import BaseWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import read_adapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import STANDARD, tiny_spec, with_vocab
from mstar_tp.wire.values import AdapterKey

SPEC = tiny_spec()
FULL_SPEC = with_vocab(tiny_spec(), 32)
"""The spec with the embedding and the head."""
Q = "self_attn.q_proj"
Q0, Q1 = (STANDARD.format(layer=n, module=Q) for n in (0, 1))


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    spec: LoraSpec = SPEC,
    rank: int = 0,
    world_size: int = 1,
    base: BaseWeights | None = None,
) -> LoadedAdapter:
    return read_adapter(
        spec,
        AdapterKey("x", 1),
        check_adapter_file(spec, "x", path),
        rank=rank,
        world_size=world_size,
        dtype=dtype,
        page_locked=False,
        base=base,
    )


def change(
    adapter: LoadedAdapter, target: str, layer: int, index: int, spec: LoraSpec = SPEC
) -> torch.Tensor:
    """The weight change of one slice, [out, in], from the CPU copy."""
    places = {t.name: t for t in spec.targets}[target]
    sizes = [part.out_features for part in places.out_slices]
    first = sum(sizes[:index])
    a = adapter.a[target][layer, index * spec.max_rank : (index + 1) * spec.max_rank]
    return adapter.b[target][layer, first : first + sizes[index]].float() @ a.float()


def q_change(adapter: LoadedAdapter, layer: int = 0) -> torch.Tensor:
    return change(adapter, "self_attn.qkv_proj", layer, 0)


def everywhere(tensor: torch.Tensor, value: float) -> bool:
    return torch.allclose(tensor, torch.full_like(tensor, value), rtol=1e-6, atol=1e-8)


def refusal(path: Path, *, spec: LoraSpec = SPEC, base: BaseWeights | None = None) -> str:
    with pytest.raises(AdapterError) as caught:
        load(path, spec=spec, base=base)
    text = str(caught.value)
    assert "'x'" in text and "Traceback" not in text and text.isprintable()
    return text
