"""Attention over paged keys and values: the cache and the layer.

A page holds ``page_size`` tokens; token ``i`` of a request lies in its page ``i // page_size``. A *cache slot* is one
token's place, ``page * page_size + offset``. The step's plan (``attention_plan``) says which slots to write and read, so a layer
only writes, gathers and attends. Step thread only.

Legend: T tokens of the step, B rows of a part, N queries a row, L keys a row, H query heads, K key/value heads,
G query heads a key head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mstar_tp.layers.attention_math import attend
from mstar_tp.layers.attention_plan import (
    AttentionPart,
    AttentionPlan,
    AttentionRow,
    build_attention_plan,
)

__all__ = [
    "Attention",
    "AttentionPlan",
    "AttentionRow",
    "ForwardContext",
    "KVCache",
    "build_attention_plan",
]


class KVCache:
    """Keys and values of one layer: ``k`` and ``v`` [num_pages, page_size, K, D]."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        assert k.shape == v.shape, f"keys {tuple(k.shape)}, values {tuple(v.shape)}"
        self.k = k
        self.v = v
        self.k_slots = k.view(k.shape[0] * k.shape[1], -1)  # [slots, K*D], the same memory
        self.v_slots = v.view(v.shape[0] * v.shape[1], -1)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Pages whose contents are undefined until written."""
        shape = (num_pages, page_size, kv_heads, head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(k, v)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a step's forward needs besides weights: its plan, and every layer's cache."""

    attn: AttentionPlan
    kv: list[KVCache]


class Attention(nn.Module):
    """One layer's attention: grouped queries, causal, optionally over a sliding window.

    A token at position p sees positions p - sliding_window + 1 to p (all up to p without a window).
    ``logit_softcap`` c bends every score s to c * tanh(s / c).
    """

    def __init__(
        self,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} kv heads"
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.logit_softcap = logit_softcap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Keep k and v [T, K*D] in the cache and attend with q [T, H*D] -> [T, H*D]."""
        plan, cache = ctx.attn, ctx.kv[self.layer_index]
        cache.k_slots.index_copy_(0, plan.slots, k)
        cache.v_slots.index_copy_(0, plan.slots, v)
        parts = plan.parts(self.sliding_window, q.dtype)
        if len(parts) == 1:
            return self._attend(parts[0], q, k, v, cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in parts:
            here = part.tokens
            out[here] = self._attend(part, q[here], k[here], v[here], cache)
        return out

    def _attend(
        self,
        part: AttentionPart,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """One part's tokens: q [B*N, H*D], their own k and v [B*N, K*D] -> [B*N, H*D]."""
        if part.keys is not None:
            k = F.embedding(part.keys, cache.k_slots)
            v = F.embedding(part.keys, cache.v_slots)
        rows, heads, dim = part.num_rows, self.num_kv_heads, self.head_dim
        k_BKLD = k.reshape(rows, part.num_keys, heads, dim).transpose(1, 2)
        v_BKLD = v.reshape(rows, part.num_keys, heads, dim).transpose(1, 2)
        q_BNHD = q.reshape(rows, part.num_queries, self.num_heads, dim)
        out = attend(q_BNHD, k_BKLD, v_BKLD, part, self.scale, self.logit_softcap)
        return out.reshape(rows * part.num_queries, self.num_heads * dim)
