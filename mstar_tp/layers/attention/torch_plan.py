"""The map of one step's tokens onto cache slots and of who sees whom, shared by attention layers.

Built once a step from the rows, before the forward. Masks depend on a layer's sliding window, so
they are laid out when the first layer with that window asks, and kept for the rest of the step.
Indices are computed with numpy, whose calls on such small arrays cost half of torch's, and moved to
the device whole. Step thread only.

A row's padding in a batched gather repeats a slot of the same row, so a layer never reads a slot
that nobody wrote.

Legend: B rows of a part, N queries a row, L keys a row, H query heads, K
key/value heads, P slots of a row's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]

_PAGED_TABLE = 1 << 16
"""The pages that rows of several queries may list for a kernel that takes queries one by one.

Each query lists its own. Past it they are long, and products of matrices are faster.
"""

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
        paged: where a kernel finds the rows' keys by itself; ``keys`` and ``mask`` are None then.
    """

    tokens: slice | torch.Tensor
    num_rows: int
    num_queries: int
    num_keys: int
    keys: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool
    paged: PagedRows | None = None


class PagedRows(NamedTuple):
    """Queries one by one: int64 ``tokens`` [B], ``pages`` [B, W], ``lengths`` [B] in keys."""

    tokens: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor


class PartKey(NamedTuple):
    """The facts of a layer that a part's layout depends on: the same for most layers of a model.

    ``flat_decode`` asks for the mask with N = 1 that batched products take, a matrix a key head;
    ``paged`` for queries as a kernel takes them, one by one.
    """

    window: int | None
    num_heads: int
    num_kv_heads: int
    mask_dtype: torch.dtype
    flat_decode: bool
    paged: bool


class _Group(NamedTuple):
    """Rows with equally many new tokens, all fresh (no context, several tokens) or none.

    ``contexts`` [B]; ``tokens`` their tokens' places in the step; ``slots`` [B, P] the cache slots
    of every row's pages ``pages`` [B, W], short rows padded with slots of their own; ``new_slots``
    [B*N] those of the new tokens.
    """

    num_queries: int
    fresh: bool
    contexts: Indices
    tokens: slice | Indices
    pages: Indices
    slots: Indices
    new_slots: Indices


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's layout. ``slots`` int64 [T]: where each token's key and value go in the cache."""

    num_tokens: int
    slots: torch.Tensor
    device: torch.device
    _groups: tuple[_Group, ...]
    _parts: dict[PartKey, tuple[AttentionPart, ...]] = field(default_factory=dict)

    def parts(self, key: PartKey) -> tuple[AttentionPart, ...]:
        """The batches a layer of this kind runs; laid out on the step's first call."""
        found = self._parts.get(key)
        if found is None:
            found = tuple(_lay_out(group, key, self.device) for group in self._groups)
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
        _build_group([rows[i] for i in members], [firsts[i] for i in members], page_size)
        for members in _batches(rows)
    )
    if len(groups) == 1 and isinstance(groups[0].tokens, slice):
        slots = groups[0].new_slots
    else:
        slots = np.empty(total, np.int64)
        for group in groups:
            slots[group.tokens] = group.new_slots
    return AttentionPlan(total, _to_device(slots, device), device, groups)


def _batches(rows: Sequence[AttentionRow]) -> list[list[int]]:
    """Rows that run together: equally many new tokens, and lengths that do not pad too much."""
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
    """Tell whether the row's keys are its new tokens' alone; a lone first token is as a decode."""
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


def _build_group(rows: list[AttentionRow], firsts: list[int], page_size: int) -> _Group:
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
    pages_BW = np.array(table, np.int64)
    slots_BP = (pages_BW[..., None] * page_size + np.arange(page_size)).reshape(len(rows), -1)
    contexts = np.array([row.context for row in rows], np.int64)
    new_slots_BN = _pick(slots_BP, _query_positions(contexts, num_queries))
    return _Group(
        num_queries,
        _is_fresh(rows[0]),
        contexts,
        _places(firsts, num_queries),
        pages_BW,
        slots_BP,
        new_slots_BN.reshape(-1),
    )


def _query_positions(contexts_B: Indices, num_queries: int) -> Indices:
    """Positions of the new tokens in their requests: [B, N]."""
    return contexts_B[:, None] + np.arange(num_queries)


def _pick(table_BP: Indices, index_BX: Indices) -> Indices:
    """Each row's entries at that row's indices: [B, X]."""
    picked: Indices = table_BP[np.arange(len(table_BP))[:, None], index_BX]
    return picked


def _places(firsts: list[int], num_queries: int) -> slice | Indices:
    """Places in the step of rows that start at ``firsts``: a slice when they stand side by side."""
    if firsts == list(range(firsts[0], firsts[-1] + 1, num_queries)):
        return slice(firsts[0], firsts[-1] + num_queries)
    return _query_positions(np.array(firsts, np.int64), num_queries).reshape(-1)


def _to_device(indices: Indices, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(indices).to(device)


def _lay_out(group: _Group, key: PartKey, device: torch.device) -> AttentionPart:
    num_rows, num_queries, window = len(group.contexts), group.num_queries, key.window
    tokens = group.tokens if isinstance(group.tokens, slice) else _to_device(group.tokens, device)
    if key.paged and (num_queries == 1 or group.pages.size * num_queries <= _PAGED_TABLE):
        return AttentionPart(
            tokens, num_rows, num_queries, 0, None, None, False, _paged(group, device)
        )
    if group.fresh and (window is None or window >= num_queries):
        return AttentionPart(tokens, num_rows, num_queries, num_queries, None, None, causal=True)
    queries_BN = _query_positions(group.contexts, num_queries)
    # The first query's window bounds what the row reads at all.
    first_B = np.zeros_like(group.contexts)
    if window is not None:
        first_B = np.maximum(group.contexts + 1 - window, 0)
    spans_B = group.contexts + num_queries - first_B
    num_keys = int(spans_B.max())
    keys_BL = first_B[:, None] + np.arange(num_keys)
    mask = None
    if num_queries > 1:
        positions = _to_device(queries_BN, device), _to_device(keys_BL, device)
        mask = _mask(*positions, window, key.mask_dtype)
    elif spans_B.min() < num_keys:
        mask = _decode_mask(queries_BN, keys_BL, key).to(device)
    gather = None
    if not group.fresh:
        gather = _to_device(_gather_index(group, queries_BN, keys_BL, key.num_kv_heads), device)
    return AttentionPart(tokens, num_rows, num_queries, num_keys, gather, mask, causal=False)


def _paged(group: _Group, device: torch.device) -> PagedRows:
    here, count = group.tokens, group.num_queries
    tokens = np.arange(here.start, here.stop) if isinstance(here, slice) else here
    lengths = _query_positions(group.contexts, count).reshape(-1) + 1
    pages = group.pages if count == 1 else np.repeat(group.pages, count, axis=0)
    return PagedRows(*(_to_device(x, device) for x in (tokens, pages, lengths)))


def _gather_index(
    group: _Group, queries_BN: Indices, keys_BL: Indices, num_kv_heads: int
) -> Indices:
    """Rows of a cache [slots * K, head_dim] so that the result reads [B, K, L, head_dim]."""
    # Past the row's end the mask hides a key, but it must be one of the row's own: its newest.
    slots_BL = _pick(group.slots, np.minimum(keys_BL, queries_BN[:, -1:]))
    heads_K1 = np.arange(num_kv_heads)[:, None]
    return (slots_BL[:, None] * num_kv_heads + heads_K1).reshape(-1)


def _decode_mask(queries_B1: Indices, keys_BL: Indices, key: PartKey) -> torch.Tensor:
    """0 where the one query sees a key, -inf past its row's end: [B, 1, 1, L] or [B*K, H/K, L]."""
    mask_BL = np.where(keys_BL > queries_B1, np.float32("-inf"), np.float32(0))
    mask = torch.from_numpy(mask_BL).to(key.mask_dtype)[:, None, None]
    if not key.flat_decode:
        return mask
    group = key.num_heads // key.num_kv_heads
    rows, num_keys = keys_BL.shape
    mask_BKGL = mask.expand(rows, key.num_kv_heads, group, num_keys)
    return mask_BKGL.reshape(-1, group, num_keys)


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
