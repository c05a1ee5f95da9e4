"""Attention over paged keys and values: the cache and the layer.

A page holds ``page_size`` tokens; token ``i`` of a request lies in its page ``i // page_size``. A
*cache slot* is one token's place, ``page * page_size + offset``. The step's plan
(``attention_plan``) says which slots to write and read, so a layer only writes, gathers and
attends. Step thread only.

Legend: T tokens of the step, B rows of a part, N queries a row, L keys a row, H query heads, K
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.attention.attention_math import attend, decodes_in_products, score_dtype
from mstar_tp.layers.attention.shape import AttentionShape
from mstar_tp.layers.attention.torch_plan import (
    AttentionPart,
    AttentionPlan,
    AttentionRow,
    PagedRows,
    PartKey,
    build_attention_plan,
)

__all__ = [
    "Attention",
    "AttentionBreaks",
    "AttentionPlan",
    "AttentionPlanner",
    "AttentionRow",
    "AttentionShape",
    "ForwardContext",
    "GivenRows",
    "KVCache",
    "KernelPlan",
    "TorchPlanner",
    "build_attention_plan",
]


class KernelPlan(Protocol):
    """A step laid out for kernels that write and walk the pages themselves."""

    @property
    def num_tokens(self) -> int: ...

    def attend(
        self,
        shape: AttentionShape,
        q_TX: torch.Tensor,
        k_TX: torch.Tensor,
        v_TX: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> torch.Tensor:
        """Keep k and v [T, K*D] in the cache and attend with q [T, H*D] -> [T, H*D]."""
        ...


class AttentionPlanner(Protocol):
    """Lays out steps; see ``attention_backend`` for who is chosen."""

    def plan(self, rows: Sequence[AttentionRow]) -> AttentionPlan | KernelPlan:
        """Plan the attention of the rows, in the order of their tokens."""
        ...


class TorchPlanner:
    """Plans for torch's own operations and the CPU's kernels."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device

    def plan(self, rows: Sequence[AttentionRow]) -> AttentionPlan:
        return build_attention_plan(rows, self._page_size, self._device)


class KVCache:
    """Keys and values of one layer: ``k`` and ``v`` [num_pages, page_size, K, D]."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        assert k.shape == v.shape, f"keys {tuple(k.shape)}, values {tuple(v.shape)}"
        self.k = k
        self.v = v
        num_pages, page_size, heads, head_dim = k.shape
        slots = num_pages * page_size
        # The same memory as layers address it: [slots, K*D] to write, [slots * K, D] to read.
        self.k_slots, self.v_slots = (x.view(slots, heads * head_dim) for x in (k, v))
        self.k_heads, self.v_heads = (x.view(slots * heads, head_dim) for x in (k, v))

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


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """Hidden states that stand for some of a step's tokens.

    That of token ``places[i]`` ([R], int64) is ``hidden[i]`` ([R, D]).
    """

    places: torch.Tensor
    hidden: torch.Tensor


class AttentionBreaks(Protocol):
    """Runs attention in the layers' place."""

    def attend(
        self, layer: Attention, q_TX: torch.Tensor, k_TX: torch.Tensor, v_TX: torch.Tensor
    ) -> torch.Tensor:
        """The output [T, H*D] of ``layer`` for q, k and v."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of a step's forward besides weights.

    These are its plan, every layer's cache, and the tokens that are no text. With ``breaks``
    somebody else attends, and there is no plan.
    """

    attn: AttentionPlan | KernelPlan | None
    kv: list[KVCache]
    given: GivenRows | None = None
    breaks: AttentionBreaks | None = None


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
        self.shape = AttentionShape(
            num_heads, num_kv_heads, head_dim, scale, sliding_window, logit_softcap
        )
        self._part_keys: dict[torch.dtype, PartKey] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Keep k and v [T, K*D] in the cache and attend with q [T, H*D] -> [T, H*D]."""
        if ctx.breaks is not None:
            return ctx.breaks.attend(self, q, k, v)
        plan, cache = ctx.attn, ctx.kv[self.layer_index]
        assert plan is not None, "nobody laid the step out"
        if not isinstance(plan, AttentionPlan):
            return plan.attend(self.shape, q, k, v, cache.k, cache.v)
        cache.k_slots.index_copy_(0, plan.slots, k)
        cache.v_slots.index_copy_(0, plan.slots, v)
        parts = plan.parts(self._part_key(q))
        alone = len(parts) == 1 and isinstance(parts[0].tokens, slice)
        if alone and parts[0].paged is None:
            return self._attend(parts[0], q, k, v, cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in parts:
            if part.paged is not None:
                self._attend_paged(part.paged, q, cache, out)
                continue
            here = part.tokens
            out[here] = self._attend(part, q[here], k[here], v[here], cache)
        return out

    def _part_key(self, q: torch.Tensor) -> PartKey:
        """The facts that this layer's parts are laid out by; a layer stays on one device."""
        key = self._part_keys.get(q.dtype)
        if key is None:
            flat_decode = self.shape.softcap is None and decodes_in_products(q)
            heads = (self.shape.num_heads, self.shape.num_kv_heads)
            paged = cpu_kernels(q.device, q.dtype) is not None
            key = PartKey(self.shape.window, *heads, score_dtype(q), flat_decode, paged)
            self._part_keys[q.dtype] = key
        return key

    def _attend(
        self,
        part: AttentionPart,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """One part's tokens: q [B*N, H*D], their own k and v [B*N, K*D] -> [B*N, H*D]."""
        rows, heads, dim = part.num_rows, self.shape.num_heads, self.shape.head_dim
        q_BNHD = q.view(rows, part.num_queries, heads, dim)
        keys = partial(self._read, part, k, cache.k_heads)
        values = partial(self._read, part, v, cache.v_heads)
        out = attend(q_BNHD, keys, values, part, self.shape.scale, self.shape.softcap)
        return out.reshape(rows * part.num_queries, heads * dim)

    def _attend_paged(
        self, rows: PagedRows, q: torch.Tensor, cache: KVCache, out: torch.Tensor
    ) -> None:
        kernels = cpu_kernels(q.device, q.dtype)
        assert kernels is not None, "the plan was laid out for a kernel"
        kernels.decode_attention(
            q,
            cache.k,
            cache.v,
            *rows,
            num_heads=self.shape.num_heads,
            window=self.shape.window,
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            out_TX=out,
        )

    def _read(self, part: AttentionPart, own: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Keys or values that the part's rows may see: [B, K, L, D]."""
        rows, heads, dim = part.num_rows, self.shape.num_kv_heads, self.shape.head_dim
        if part.keys is None:
            return own.view(rows, part.num_keys, heads, dim).transpose(1, 2)
        return cached.index_select(0, part.keys).view(rows, heads, part.num_keys, dim)
