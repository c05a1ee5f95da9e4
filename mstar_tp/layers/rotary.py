"""Rotary position embedding: the frequency rules of the families we serve, and the rotation.

Cos and sin are tabulated once in float32 for every position. A model looks its step's positions up
once (``lookup``) and rotates every layer's queries and keys with the result (``rotate``).

Legend: T tokens, H query heads, KH key heads, D head size, P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from mstar_tp.kernels.cpu import cpu_kernels

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The map of positions to angles; fields are those of Hugging Face's ``rope_parameters``.

    ``factor`` stretches the context; ``original_max_position`` is the length the model was trained
    at before (llama3, yarn).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class RotaryTables(NamedTuple):
    """One step's angles: ``cos`` and ``sin`` [T, 1, D], the first half of ``sin`` negated."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, below ``max_position``."""

    def __init__(
        self,
        head_dim: int,
        config: RopeConfig,
        max_position: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert head_dim % 2 == 0, f"wanted an even head size, got {head_dim}"
        self.head_dim = head_dim
        self._half = head_dim // 2
        inv_freq, scale = inverse_frequencies(head_dim, config)
        angles_PD = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        cos, sin = angles_PD.cos() * scale, angles_PD.sin() * scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self.table_P2D = table.to(device)
        """Cos, then sin with its first half negated: float32 [P, 2, D], one lookup reads both."""

    def lookup(self, positions_T: torch.Tensor, dtype: torch.dtype) -> RotaryTables:
        """The angles of a step's positions, int64 [T], in the dtype of the queries to rotate."""
        table_T2D = self.table_P2D.index_select(0, positions_T).to(dtype)
        cos_TD, sin_TD = table_T2D.chunk(2, dim=1)
        return RotaryTables(cos_TD, sin_TD)

    def rotate(
        self, tables: RotaryTables, q_THD: torch.Tensor, k_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D] and k [T, KH, D], rotated: in place, or copies."""
        kernels = cpu_kernels(q_THD.device, q_THD.dtype)
        if kernels is not None:
            kernels.rotate(q_THD, k_TKD, tables.cos, tables.sin)
            return q_THD, k_TKD
        qk_TXD = _side_by_side(q_THD, k_TKD)
        if qk_TXD is None:
            return self._turn(tables, q_THD), self._turn(tables, k_TKD)
        turned_TXD = self._turn(tables, qk_TXD)
        return turned_TXD[:, : q_THD.shape[1]], turned_TXD[:, q_THD.shape[1] :]

    def forward(
        self, positions_T: torch.Tensor, q_THD: torch.Tensor, k_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rotate`` by freshly looked up angles: for callers that rotate once."""
        return self.rotate(self.lookup(positions_T, q_THD.dtype), q_THD, k_TKD)

    def _turn(self, tables: RotaryTables, x_THD: torch.Tensor) -> torch.Tensor:
        turned_THD = x_THD.roll(self._half, -1)
        return torch.addcmul(x_THD * tables.cos, turned_THD, tables.sin)


def _side_by_side(q_THD: torch.Tensor, k_TKD: torch.Tensor) -> torch.Tensor | None:
    """q and k as one view [T, H + KH, D] where one projection wrote both: half the kernels."""
    heads, dim = q_THD.shape[1:]
    if (
        q_THD.stride() != k_TKD.stride()
        or q_THD.stride()[1:] != (dim, 1)
        or k_TKD.data_ptr() != q_THD.data_ptr() + heads * dim * q_THD.element_size()
        or k_TKD.untyped_storage().data_ptr() != q_THD.untyped_storage().data_ptr()
    ):
        return None
    shape = (q_THD.shape[0], heads + k_TKD.shape[1], dim)
    return q_THD.as_strided(shape, q_THD.stride())


def inverse_frequencies(head_dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Radians a position step, float32 [D / 2], and the factor cos and sin are scaled by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    # float32 all through and in transformers' order: at a far position the angle is the frequency's
    # rounding error thousands of times over, and checkpoints are run with theirs.
    spans = config.theta**exponents
    inv_freq = 1.0 / spans
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _yarn(spans, head_dim, config), _yarn_scale(config)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow frequencies are stretched, fast ones kept, those between blended by their turns."""
    turns = config.original_max_position / (2 * math.pi / inv_freq)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * inv_freq / config.factor + keep * inv_freq


def _yarn(spans: torch.Tensor, head_dim: int, config: RopeConfig) -> torch.Tensor:
    """llama3's frequencies, but blended linearly by their index between two turn counts."""

    def index_of(turns: float) -> float:
        length = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    first, last = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a ramp of no width would divide by zero
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((index - first) / width).clamp(0, 1)
    return 1.0 / (config.factor * spans) * (1 - keep) + 1.0 / spans * keep


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
