"""Pins that rotary angles and rotations are transformers' for every kind of scaling served."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on our CPU kernels, and on torch alone as where they cannot be compiled."""
    if request.param == "torch":
        monkeypatch.setattr("mstar_tp.layers.rotary.cpu_kernels", lambda device, dtype: None)
    elif cpu_kernels(torch.device("cpu"), torch.float32) is None:
        pytest.skip("no C++ compiler")


HEAD_DIM = 32
MAX_POSITION = 1024
CONFIGS = {
    "default": RopeConfig(theta=10000.0),
    "large theta": RopeConfig(theta=1e6),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=256,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_position=256),
    "yarn, untruncated, other betas": RopeConfig(
        kind="yarn",
        theta=1e6,
        factor=16.0,
        original_max_position=64,
        beta_fast=24.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "yarn, given scale": RopeConfig(
        kind="yarn", factor=4.0, original_max_position=256, attention_factor=1.25
    ),
    "yarn, two mscales": RopeConfig(
        kind="yarn", factor=40.0, original_max_position=64, mscale=0.707, mscale_all_dim=1.2
    ),
}


def theirs(config: RopeConfig) -> LlamaRotaryEmbedding:
    rope: dict[str, object] = {"rope_type": config.kind, "rope_theta": config.theta}
    if config.kind != "default":
        rope["factor"] = config.factor
    if config.kind == "llama3":
        rope["low_freq_factor"] = config.low_freq_factor
        rope["high_freq_factor"] = config.high_freq_factor
    if config.kind == "yarn":
        rope |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow}
        rope["truncate"] = config.truncate
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(config, key) is not None:
                rope[key] = getattr(config, key)
    if config.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = config.original_max_position
    model = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=rope,
    )
    return LlamaRotaryEmbedding(model)


def rotate_as_they_do(
    config: RopeConfig, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = theirs(config)(q, positions[None])
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_rotated_queries_and_keys_are_transformers(config: RopeConfig) -> None:
    torch.manual_seed(1)
    positions = torch.cat((torch.arange(6), torch.randint(0, MAX_POSITION, (34,))))
    q, k = torch.randn(40, 6, HEAD_DIM), torch.randn(40, 2, HEAD_DIM)
    wanted_q, wanted_k = rotate_as_they_do(config, positions, q, k)
    got_q, got_k = RotaryEmbedding(HEAD_DIM, config, MAX_POSITION)(positions, q, k)
    torch.testing.assert_close(got_q, wanted_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_k, wanted_k, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_frequencies_are_transformers(config: RopeConfig) -> None:
    got, scale = inverse_frequencies(HEAD_DIM, config)
    wanted = theirs(config)
    torch.testing.assert_close(got, wanted.inv_freq, rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(wanted.attention_scaling, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    theta=st.sampled_from([10000.0, 5e5, 1e6]),
    factor=st.floats(1.0, 64.0),
    original=st.integers(16, 8192),
    low=st.floats(0.5, 2.0),
    span=st.floats(0.5, 8.0),
)
def test_llama3_blends_as_transformers_does(
    theta: float, factor: float, original: int, low: float, span: float
) -> None:
    config = RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=low + span,
    )
    got, _ = inverse_frequencies(HEAD_DIM, config)
    # Near a blend's edge the two float32 formulas differ by rounding, never by a branch's jump.
    torch.testing.assert_close(got, theirs(config).inv_freq, rtol=5e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_views_of_one_projection_rotate_as_separate_tensors_do(dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(HEAD_DIM, RopeConfig(), MAX_POSITION)
    heads, kv_heads, tokens = 6, 2, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * HEAD_DIM).to(dtype)
    sizes = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM]
    q, k, _ = torch.split_with_sizes(qkv, sizes, -1)
    q, k = q.view(tokens, heads, HEAD_DIM), k.view(tokens, kv_heads, HEAD_DIM)
    before = qkv.clone()
    tables = rope.lookup(torch.randint(0, MAX_POSITION, (tokens,)), dtype)
    apart = rope.rotate(tables, q.clone(), k.clone())
    together = rope.rotate(tables, q, k)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])
    values = -kv_heads * HEAD_DIM
    assert torch.equal(qkv[:, values:], before[:, values:])
    assert together[0].dtype == dtype


def test_views_that_only_look_adjacent_are_rotated_apart() -> None:
    rope = RotaryEmbedding(HEAD_DIM, RopeConfig(), MAX_POSITION)
    buffer = torch.randn(4, 10, HEAD_DIM)
    tables = rope.lookup(torch.arange(4), torch.float32)
    for q, k in (
        (buffer[:, :4], buffer[:, 5:7]),  # a head between them
        (buffer[:, 4:8], buffer[:, 2:4]),  # k before q
        (buffer[:, :4], buffer[:, 4:6].clone()),  # another tensor
    ):
        apart = rope.rotate(tables, q.clone(), k.clone())
        got = rope.rotate(tables, q, k)
        assert torch.equal(got[0], apart[0])
        assert torch.equal(got[1], apart[1])
