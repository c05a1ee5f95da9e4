"""How one step's tokens map onto cache slots, and who sees whom: what attention layers share.

Built once a step from the rows, before the forward. Masks depend on a layer's sliding window, so
they are laid out when the first layer with that window asks, and kept for the rest of the step.
Step thread only.

A row's padding in a batched gather repeats a slot of the same row, so a layer never reads a slot
that nobody wrote.

Legend: B rows of a part, N queries a row, L keys a row, H query heads, K
key/value heads, P slots of a row's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_LENGTH_RATIO = 2  # rows are batched with rows at most this many times longer ...
_SHORT = (
    256  # ... unless all have at most this many keys: padding them costs less than a batch more
)


class AttentionRow(NamedTuple):
    """One request's share of a step: ``num_tokens`` new tokens after ``context`` cached ones.

    ``pages`` hold tokens 0 to context + num_tokens - 1, in order; more pages may follow.
    """

    num_tokens: int
    context: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Rows of one shape that a layer attends to in one batch.

    Attributes:
        tokens: where the part's B*N tokens stand in the step: a slice, or indices int64 [B*N].
        num_rows: B.
        num_queries: N.
        num_keys: L.
        keys: where the keys lie, head by head, in a cache seen as [slots * K, head_dim]: int64
            [B*K*L]. None when the keys are the part's own tokens.
        mask: added to the scores, [B, 1, N, L], or with N = 1 on request [B*K, H/K, L]; None when
            every key counts, or only ``causal`` bars any.
        causal: query i sees keys 0 to i (only with ``keys`` None).
    """

    tokens: slice | torch.Tensor
    num_rows: int
    num_queries: int
    num_keys: int
    keys: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool


class PartKey(NamedTuple):
    """What a part's layout depends on besides the rows: the same for most layers of a model.

    ``flat_decode`` asks for the mask with N = 1 that batched products take, a matrix a key head.
    """

    window: int | None
    num_heads: int
    num_kv_heads: int
    mask_dtype: torch.dtype
    flat_decode: bool


class _Group(NamedTuple):
    """Rows with equally many new tokens, all fresh (no context, several tokens) or none.

    ``positions`` are their tokens' places in the step, row by row; ``slots`` int64 [B, P] the slots
    of every row's pages, short rows padded with slots of their own.
    """

    num_queries: int
    fresh: bool
    contexts: list[int]
    positions: list[int]
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's layout. ``slots`` int64 [T]: where each token's key and value go in the cache."""

    num_tokens: int
    slots: torch.Tensor
    _groups: tuple[_Group, ...]
    _parts: dict[PartKey, tuple[AttentionPart, ...]] = field(default_factory=dict)

    def parts(self, key: PartKey) -> tuple[AttentionPart, ...]:
        """The batches a layer of this kind runs; laid out on the step's first call."""
        found = self._parts.get(key)
        if found is None:
            found = tuple(_lay_out(group, key) for group in self._groups)
            self._parts[key] = found
        return found


def build_attention_plan(
    rows: Sequence[AttentionRow], page_size: int, device: torch.device
) -> AttentionPlan:
    """Lay out a step whose tokens are those of ``rows``, in that order."""
    firsts, total = [], 0
    for row in rows:
        assert row.num_tokens > 0, "a row of a step has at least one token"
        firsts.append(total)
        total += row.num_tokens
    groups = tuple(
        _build_group([rows[i] for i in members], [firsts[i] for i in members], page_size, device)
        for members in _batches(rows)
    )
    slots = torch.empty(total, dtype=torch.int64, device=device)
    for group in groups:
        new_BN = group.slots.gather(1, _query_positions(group))
        slots[_place(group.positions, device)] = new_BN.flatten()
    return AttentionPlan(total, slots, groups)


def _batches(rows: Sequence[AttentionRow]) -> list[list[int]]:
    """Which rows run together: equally many new tokens, and lengths that do not pad too much."""
    by_shape: dict[tuple[int, bool], list[int]] = {}
    for i, row in enumerate(rows):
        by_shape.setdefault((row.num_tokens, _is_fresh(row)), []).append(i)
    batches: list[list[int]] = []
    for members in by_shape.values():
        lengths = [rows[i].context for i in members]
        if max(lengths) <= max(_SHORT, _LENGTH_RATIO * min(lengths)):
            batches.append(members)
        else:
            batches += _split_by_length(members, rows)
    return batches


def _is_fresh(row: AttentionRow) -> bool:
    """Whether the row's keys are its own new tokens' alone; a lone first token is as a decode."""
    return row.num_tokens > 1 and row.context == 0


def _split_by_length(members: list[int], rows: Sequence[AttentionRow]) -> list[list[int]]:
    """Runs of rows, shortest first, none much longer than its run's first."""
    batches: list[list[int]] = []
    limit = -1
    for i in sorted(members, key=lambda i: rows[i].context):
        if rows[i].context > limit:
            batches.append([])
            limit = max(_SHORT, _LENGTH_RATIO * rows[i].context)
        batches[-1].append(i)
    return batches


def _build_group(
    rows: list[AttentionRow], firsts: list[int], page_size: int, device: torch.device
) -> _Group:
    num_queries = rows[0].num_tokens
    num_pages = [-(-(row.context + num_queries) // page_size) for row in rows]
    widest = max(num_pages)
    table = []
    for row, used in zip(rows, num_pages, strict=True):
        pages = list(row.pages[:used])
        assert len(pages) == used, (
            f"a row of {row.context + num_queries} tokens has {len(pages)} pages of {page_size}"
        )
        table.append(pages + pages[:1] * (widest - used))
    pages_BW = torch.tensor(table, dtype=torch.int64, device=device)
    offsets = torch.arange(page_size, device=device)
    slots_BP = (pages_BW.unsqueeze(-1) * page_size + offsets).flatten(1)
    positions = [first + n for first in firsts for n in range(num_queries)]
    contexts = [row.context for row in rows]
    return _Group(num_queries, _is_fresh(rows[0]), contexts, positions, slots_BP)


def _query_positions(group: _Group) -> torch.Tensor:
    """Positions of the new tokens in their requests: int64 [B, N]."""
    device = group.slots.device
    contexts_B1 = torch.tensor(group.contexts, device=device).unsqueeze(1)
    return contexts_B1 + torch.arange(group.num_queries, device=device)


def _place(positions: list[int], device: torch.device) -> slice | torch.Tensor:
    first, count = positions[0], len(positions)
    if positions == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(positions, dtype=torch.int64, device=device)


def _lay_out(group: _Group, key: PartKey) -> AttentionPart:
    num_rows, num_queries, window = len(group.contexts), group.num_queries, key.window
    device = group.slots.device
    tokens = _place(group.positions, device)
    if group.fresh and (window is None or window >= num_queries):
        return AttentionPart(tokens, num_rows, num_queries, num_queries, None, None, causal=True)
    # The first query's window bounds what the row reads at all.
    skips = [0 if window is None else max(0, c + 1 - window) for c in group.contexts]
    spans = [c + num_queries - s for c, s in zip(group.contexts, skips, strict=True)]
    num_keys = max(spans)
    skips_B1 = torch.tensor(skips, device=device).unsqueeze(1)
    keys_BL = skips_B1 + torch.arange(num_keys, device=device)
    queries_BN = _query_positions(group)
    mask = None
    if num_queries > 1 or min(spans) < num_keys:
        mask = _mask(queries_BN, keys_BL, window, key.mask_dtype)
        if num_queries == 1 and key.flat_decode:
            heads = (key.num_kv_heads, key.num_heads // key.num_kv_heads)
            mask = mask.expand(num_rows, *heads, num_keys).flatten(0, 1).contiguous()
    gather = None if group.fresh else _gather_index(group, queries_BN, keys_BL, key.num_kv_heads)
    return AttentionPart(tokens, num_rows, num_queries, num_keys, gather, mask, causal=False)


def _gather_index(
    group: _Group, queries_BN: torch.Tensor, keys_BL: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """Rows of a cache [slots * K, head_dim] so that the result reads [B, K, L, head_dim]."""
    # Past the row's end the mask hides a key, but it must be one of the row's own: its newest.
    slots_BL = group.slots.gather(1, keys_BL.minimum(queries_BN[:, -1:]))
    heads_K1 = torch.arange(num_kv_heads, device=keys_BL.device).unsqueeze(1)
    return (slots_BL.unsqueeze(1) * num_kv_heads + heads_K1).flatten()


def _mask(
    queries_BN: torch.Tensor, keys_BL: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """0 where a query sees a key, -inf elsewhere: [B, 1, N, L]."""
    distance_BNL = queries_BN.unsqueeze(-1) - keys_BL.unsqueeze(1)
    hidden_BNL = distance_BNL < 0
    if window is not None:
        hidden_BNL |= distance_BNL >= window
    mask_BNL = torch.zeros(hidden_BNL.shape, dtype=dtype, device=keys_BL.device)
    return mask_BNL.masked_fill_(hidden_BNL, float("-inf")).unsqueeze(1)
