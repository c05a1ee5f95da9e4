"""The facts of attention layers besides their weights, which plans and kernels go by."""

from __future__ import annotations

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """One rank's share of a layer. ``window`` and ``softcap``: None for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
