"""Routed experts as torch operators.

Each is one opaque node to torch.compile, without a host sync, its launches sized by shapes alone.

``torch.ops.mstar_moe.group``, ``group_slots``, ``linear`` and ``combine``. On CUDA they are Triton
kernels; on CPU tensors plain torch, or the Triton kernels where Triton interprets.

Legend: T tokens, K choices a token, P = T * K pairs (token * K + choice), E experts, S slots, N
tiles of rows [group, first and last-plus-one place in the order], O and I features, D hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from mstar_tp.kernels.triton.launch import DECODE_ROWS, PREFILL_ROWS
from mstar_tp.lora.device.ops import interprets, segments, triton_is_here
from mstar_tp.lora.device.tiles import TileSizes

_LIBRARY = torch.library.Library("mstar_moe", "DEF")
_LIBRARY.define(
    "group(Tensor experts, int num_experts, int block_rows) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "group_slots(Tensor slots, int choices, Tensor order, Tensor indptr, int num_slots, "
    "int block_rows) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor order, Tensor tiles, int per, int block_rows) -> Tensor"
)
_LIBRARY.define("combine(Tensor y, Tensor weights) -> Tensor")


def are_taken(device: torch.device) -> bool:
    """Tell whether experts on ``device`` run on these operators."""
    return interprets() or (device.type == "cuda" and triton_is_here())


class GroupedPairs(NamedTuple):
    """A layer's pairs by expert.

    ``order`` [P] and ``tiles`` [N, 3] are int32, and so is ``indptr`` [E + 1], where each expert's
    pairs begin in the order.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    indptr: torch.Tensor
    block_rows: int


class TiledPairs(NamedTuple):
    """A layer's pairs that adapters change, by expert and slot.

    ``pairs`` and their ``tokens`` are [P] int32 each, ``tiles`` [N, 3] of storage expert * S + slot
    - 1.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor
    block_rows: int


def grouped(experts_TK: torch.Tensor, num_experts: int) -> GroupedPairs:
    """Group pairs by the operator; the size of tiles follows from the number of tokens alone."""
    rows = DECODE_ROWS if experts_TK.numel() <= DECODE_ROWS * num_experts else PREFILL_ROWS
    order, tiles, indptr = torch.ops.mstar_moe.group(experts_TK, num_experts, rows)
    return GroupedPairs(order, tiles, indptr, rows)


def tiled_pairs(
    slots_T: torch.Tensor, choices: int, pairs: GroupedPairs, num_slots: int
) -> TiledPairs:
    """Tile the pairs that adapters change by the operator, from each token's slot (0: none)."""
    groups = num_slots * (len(pairs.indptr) - 1)
    rows = TileSizes.of(len(pairs.order), groups).block_rows
    made, tokens, tiles = torch.ops.mstar_moe.group_slots(
        slots_T, choices, pairs.order, pairs.indptr, num_slots, rows
    )
    return TiledPairs(made, tokens, tiles, rows)


def _num_tiles(num_pairs: int, groups: int, block_rows: int) -> int:
    """Enough for every mix: each group's last tile may be short."""
    groups = min(num_pairs, groups)
    return groups + (num_pairs - groups) // block_rows


def _tables(
    like: torch.Tensor, num_pairs: int, groups: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(an order to be filled, tiles that are empty)."""
    tiles = like.new_zeros((_num_tiles(num_pairs, groups, block_rows), 3), dtype=torch.int32)
    return like.new_zeros(num_pairs, dtype=torch.int32), tiles


def group(
    experts_TK: torch.Tensor, num_experts: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, tiles, indptr) of the pairs of ``experts``, int64 and contiguous."""
    order, tiles = _tables(experts_TK, experts_TK.numel(), num_experts, block_rows)
    indptr = experts_TK.new_empty(num_experts + 1, dtype=torch.int32)
    if experts_TK.is_cuda or interprets():
        from mstar_tp.kernels.triton.experts.experts import launch_group

        launch_group(order, tiles, indptr, experts_TK, num_experts, block_rows)
        return order, tiles, indptr
    pairs = experts_TK.flatten()
    order.copy_(pairs.argsort(stable=True))
    indptr[0] = 0
    indptr[1:] = pairs.bincount(minlength=num_experts).cumsum(0)
    bounds = indptr.tolist()
    groups = list(enumerate(pairwise(bounds)))
    _fill_tiles(tiles, groups, block_rows)
    return order, tiles, indptr


def group_slots(
    slots_T: torch.Tensor,
    choices: int,
    order_P: torch.Tensor,
    indptr: torch.Tensor,
    num_slots: int,
    block_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs, tokens, tiles) of the rows whose tokens' ``slots``, int64, are not 0."""
    num_experts = len(indptr) - 1
    pairs, tiles = _tables(order_P, len(order_P), num_experts * num_slots, block_rows)
    tokens = torch.zeros_like(pairs)
    if order_P.is_cuda or interprets():
        from mstar_tp.kernels.triton.experts.experts import launch_group_slots

        launch_group_slots(
            pairs, tokens, tiles, slots_T, choices, order_P, indptr, num_slots, block_rows
        )
        return pairs, tokens, tiles
    groups: list[tuple[int, tuple[int, int]]] = []
    bounds = indptr.tolist()
    for expert in range(num_experts):
        mine, begin = order_P[bounds[expert] : bounds[expert + 1]], bounds[expert]
        slots = slots_T[(mine // choices).long()]
        for slot in range(1, num_slots + 1):
            found = mine[slots == slot]
            pairs[begin : begin + len(found)] = found
            groups.append((expert * num_slots + slot - 1, (begin, begin + len(found))))
            begin += len(found)
    tokens.copy_(pairs // choices)
    _fill_tiles(tiles, groups, block_rows)
    return pairs, tokens, tiles


def _fill_tiles(
    tiles_N3: torch.Tensor, groups: list[tuple[int, tuple[int, int]]], block_rows: int
) -> None:
    made = [
        (number, start, min(stop, start + block_rows))
        for number, (first, stop) in groups
        for start in range(first, stop, block_rows)
    ]
    if made:
        tiles_N3[: len(made)] = torch.tensor(made, dtype=torch.int32)


def linear(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    order_P: torch.Tensor,
    tiles_N3: torch.Tensor,
    per: int,
    block_rows: int,
) -> torch.Tensor:
    """[P, O]: each pair's expert's weight times row pair // ``per`` of ``x``."""
    y_PO = x_RI.new_empty(len(order_P), weight_EOI.shape[1])
    if x_RI.is_cuda or interprets():
        from mstar_tp.kernels.triton.experts.experts import launch_linear

        launch_linear(y_PO, x_RI, weight_EOI, order_P, tiles_N3, per, block_rows)
        return y_PO
    for expert, first, stop in segments(tiles_N3):
        pairs = order_P[first:stop].long()
        y_PO[pairs] = x_RI[pairs // per] @ weight_EOI[expert].t()
    return y_PO


def combine(y_PD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D]: each token's rows times its ``weights``, float32 and contiguous, summed in it."""
    out_TD = y_PD.new_empty(len(weights_TK), y_PD.shape[1])
    if y_PD.is_cuda or interprets():
        from mstar_tp.kernels.triton.experts.experts import launch_sum

        launch_sum(out_TD, y_PD, weights_TK)
        return out_TD
    y_TKD = y_PD.view(*weights_TK.shape, -1)
    return out_TD.copy_((y_TKD * weights_TK[:, :, None]).sum(dim=1))


for _name, _operator in (
    ("group", group),
    ("group_slots", group_slots),
    ("linear", linear),
    ("combine", combine),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _operator, _device)


@torch.library.register_fake("mstar_moe::group", lib=_LIBRARY)
def _fake_group(
    experts: torch.Tensor, num_experts: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order, tiles = _tables(experts, experts.numel(), num_experts, block_rows)
    return order, tiles, experts.new_empty(num_experts + 1, dtype=torch.int32)


@torch.library.register_fake("mstar_moe::group_slots", lib=_LIBRARY)
def _fake_group_slots(
    slots: torch.Tensor,
    choices: int,
    order: torch.Tensor,
    indptr: torch.Tensor,
    num_slots: int,
    block_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = num_slots * (indptr.shape[0] - 1)
    pairs, tiles = _tables(order, order.shape[0], groups, block_rows)
    return pairs, torch.empty_like(pairs), tiles


@torch.library.register_fake("mstar_moe::linear", lib=_LIBRARY)
def _fake_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    per: int,
    block_rows: int,
) -> torch.Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


@torch.library.register_fake("mstar_moe::combine", lib=_LIBRARY)
def _fake_combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return y.new_empty(weights.shape[0], y.shape[1])
