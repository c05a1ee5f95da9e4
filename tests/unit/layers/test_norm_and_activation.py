"""Pins that norms and gated activations are transformers', to the bit or nearly so in every dtype:
the same rounding order, also where a residual is added on the way.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mstar_tp.layers.activation import gelu_tanh_and_mul, silu_and_mul
from mstar_tp.layers.norm import RMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
ULP = {torch.float32: 4e-7, torch.bfloat16: 0.0, torch.float16: 0.0}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def theirs(unit_offset: bool, weight: torch.Tensor) -> nn.Module:
    norm = (Gemma3RMSNorm if unit_offset else LlamaRMSNorm)(weight.numel(), eps=EPS)
    norm = norm.to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def ours(unit_offset: bool, weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(weight.numel(), EPS, weight.dtype, unit_offset)
    norm.set_weight(weight)
    return norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("shape", [(1, 64), (5, 896), (5, 3, 32)], ids=str)
@torch.inference_mode()
def test_a_norm_is_transformers_norm(
    dtype: torch.dtype, unit_offset: bool, shape: tuple[int, ...]
) -> None:
    x, weight = random(shape, dtype, 1) * 3, random(shape[-1:], dtype, 2)
    got, wanted = ours(unit_offset, weight)(x), theirs(unit_offset, weight)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=ULP[dtype], atol=ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
@torch.inference_mode()
def test_forward_add_is_the_norm_of_the_sum_and_hands_the_sum_on(
    dtype: torch.dtype, unit_offset: bool
) -> None:
    x, residual = random((5, 96), dtype, 1), random((5, 96), dtype, 2)
    norm, total = ours(unit_offset, random((96,), dtype, 3)), x + residual
    normed, handed_on = norm.forward_add(x.clone(), residual.clone())
    assert torch.equal(handed_on, total)
    assert torch.equal(normed, norm(total))


@torch.inference_mode()
def test_a_norm_leaves_its_input_alone() -> None:
    for dtype in DTYPES:
        x = random((4, 32), dtype, 1)
        before = x.clone()
        ours(False, random((32,), dtype, 2))(x)
        assert torch.equal(x, before)


def test_a_norm_over_the_wrong_size_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match=r"wanted \[8\], got \(9,\)"):
        RMSNorm(8, EPS, torch.float32).set_weight(torch.ones(9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fused, name", [(silu_and_mul, "silu"), (gelu_tanh_and_mul, "gelu_pytorch_tanh")]
)
@torch.inference_mode()
def test_a_gated_activation_is_transformers_two_halves(
    dtype: torch.dtype, fused: object, name: str
) -> None:
    gate_up = random((6, 2 * 172), dtype, 1) * 2
    before = gate_up.clone()
    gate, up = gate_up[:, :172], gate_up[:, 172:]
    got = fused(gate_up)  # type: ignore[operator]
    # An activation that falls on the edge between two values may round to either.
    ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 0.0}[dtype]
    torch.testing.assert_close(got, ACT2FN[name](gate) * up, rtol=ulp, atol=1e-6)
    assert got.is_contiguous()
    assert torch.equal(gate_up, before)
