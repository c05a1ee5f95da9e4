"""Memory of CPU copies is zero, and goes back to the system when its last tensor goes."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from support.adapter_kit import Q0, SPEC, load, refusal

from mstar_tp.lora.reading import host_memory
from mstar_tp.lora.reading.host_memory import MAPPED_BYTES, zeros
from mstar_tp.testing.lora_files import pair, write_adapter


def is_mapped(address: int) -> bool:
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().split("\n")[:-1]
    )
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5, 7), (1024, 513)])
def test_it_is_zero_writable_and_of_the_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and not tensor.any()
    tensor.fill_(1)
    assert tensor.sum() == math.prod(shape)


def test_a_large_block_is_unmapped_with_its_last_view() -> None:
    tensor = zeros((MAPPED_BYTES,), torch.uint8)
    view, address = tensor[5:9], tensor.data_ptr()
    del tensor
    gc.collect()
    assert is_mapped(address) and not view.any()
    del view
    assert not is_mapped(address)


def test_where_there_is_no_mapping_left_memory_comes_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_mapped", lambda size: None)
    assert not zeros((MAPPED_BYTES,), torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("alpha", [4, 0.3, -7])
def test_a_scaled_factor_is_multiplied_in_float32_and_cast_once(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 2, 16, dtype=torch.float32)
    b = (torch.randn(8, 2, generator=generator) * sizes.reshape(8, 2)).to(stored)
    tensors = pair(Q0, 8, 8, dtype=stored) | {f"{Q0}.lora_B.weight": b}
    adapter = load(write_adapter(tmp_path, tensors, lora_alpha=alpha), dtype)
    kept = adapter.b["self_attn.qkv_proj"][0, :8, :2]
    assert torch.equal(kept, (b.float() * (alpha / 2)).to(dtype))


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_factor_too_large_for_the_served_dtype_is_refused(tmp_path: Path, half: str) -> None:
    """Finite as stored; float16 ends at 65504."""
    tensors = pair(Q0, 8, 8, dtype=torch.float32)
    tensors[f"{Q0}.lora_{half}.weight"][1, 1] = 1e5
    folder = write_adapter(tmp_path, tensors, lora_alpha=2)
    assert load(folder).b
    with pytest.raises(ValueError, match=rf"lora_{half}\.weight in torch.float16 holds 1 values"):
        load(folder, torch.float16)
    tensors[f"{Q0}.lora_{half}.weight"][1, 1] = float("nan")
    text = refusal(write_adapter(tmp_path, tensors))
    assert f"lora_{half}.weight holds 1 values" in text and SPEC.dtype == "float32"
