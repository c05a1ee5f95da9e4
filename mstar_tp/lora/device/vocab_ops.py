"""Deltas beside the linears as torch operators.

Each is one opaque node to torch.compile, and one launch on CUDA.

``torch.ops.mstar_lora.embed``, ``head_rows``, ``add_bias`` and ``norm``. The tables are those of
``lora.ops``: rows are tiled by slot, and a row in no tile keeps every bit. On CPU tensors they are
plain torch, a slot's rows at a time, or the Triton kernels where Triton interprets.

Legend: T rows of the step, D hidden size, V ids of this rank's part of the vocabulary, O output
features, L slots, K max_rank, R rows in the order, N tiles, S saved rows.
"""

from __future__ import annotations

import torch

from mstar_tp.lora.device.ops import interprets, segments
from mstar_tp.lora.device.tiles import TiledRows

_LIBRARY = torch.library.Library("mstar_lora", "FRAGMENT")
_SAVED = "Tensor saved_ids, Tensor saved_rows, Tensor saved_counts"
_TILES = "Tensor order, Tensor tiles"
_LIBRARY.define(
    f"embed(Tensor(a!) y, Tensor ids, Tensor a, Tensor b, {_SAVED}, {_TILES}, Tensor ranks, "
    "int first_id, int block_rows) -> ()"
)
_LIBRARY.define(f"head_rows(Tensor(a!) y, Tensor x, {_SAVED}, {_TILES}, int block_rows) -> ()")
_LIBRARY.define(f"add_bias(Tensor(a!) y, Tensor bias, {_TILES}, int block_rows) -> ()")
_LIBRARY.define(
    f"norm(Tensor(a!) y, Tensor x, Tensor weight, Tensor replaced, {_TILES}, float eps, "
    "bool unit_offset, int block_rows) -> ()"
)


def embed(
    y_TD: torch.Tensor,
    ids_T: torch.Tensor,
    a_LVK: torch.Tensor,
    b_LKD: torch.Tensor,
    saved_ids_LS: torch.Tensor,
    saved_rows_LSD: torch.Tensor,
    saved_counts_L: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    first_id: int,
    block_rows: int,
) -> None:
    """``y += B a[id]`` in place on the tiles' rows, then saved rows in the place of their ids'.

    ``ids`` int64 count from 0, the storage's from ``first_id``: rows of ids outside of it stay. A
    slot's first ``saved_counts`` saved ids are ascending.
    """
    if y_TD.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.vocab import SavedTables, TileTables, launch_embed

        saved = SavedTables(saved_ids_LS, saved_rows_LSD, saved_counts_L)
        tiles = TileTables(order_R, tiles_N3, block_rows)
        launch_embed(y_TD, ids_T, a_LVK, b_LKD, saved, tiles, ranks_L, first_id)
        return
    for storage, first, stop in segments(tiles_N3):
        rows = order_R[first:stop].long()
        here = ids_T[rows] - first_id
        inside = (here >= 0) & (here < a_LVK.shape[1])
        rows, here = rows[inside], here[inside]
        rank, count = int(ranks_L[storage]), int(saved_counts_L[storage])
        y_RD = y_TD[rows]
        y_RD.addmm_(a_LVK[storage, here, :rank], b_LKD[storage, :rank])
        for at, token in enumerate(saved_ids_LS[storage, :count].tolist()):
            y_RD[here == token] = saved_rows_LSD[storage, at]
        y_TD.index_copy_(0, rows, y_RD)


def head_rows(
    y_TV: torch.Tensor,
    x_TD: torch.Tensor,
    saved_ids_LS: torch.Tensor,
    saved_rows_LSD: torch.Tensor,
    saved_counts_L: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    block_rows: int,
) -> None:
    """``y[:, ids] = rows x`` in place on the tiles' rows, each by its slot's saved rows."""
    if y_TV.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.vocab import SavedTables, TileTables, launch_head_rows

        saved = SavedTables(saved_ids_LS, saved_rows_LSD, saved_counts_L)
        launch_head_rows(y_TV, x_TD, saved, TileTables(order_R, tiles_N3, block_rows))
        return
    for storage, first, stop in segments(tiles_N3):
        rows, count = order_R[first:stop].long(), int(saved_counts_L[storage])
        y_RV = y_TV[rows]
        y_RV[:, saved_ids_LS[storage, :count]] = x_TD[rows] @ saved_rows_LSD[storage, :count].t()
        y_TV.index_copy_(0, rows, y_RV)


def add_bias(
    y_TO: torch.Tensor,
    bias_LO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    block_rows: int,
) -> None:
    """``y += bias`` in place on the tiles' rows, each by its slot's."""
    if y_TO.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.vocab import TileTables, launch_bias

        launch_bias(y_TO, bias_LO, TileTables(order_R, tiles_N3, block_rows))
        return
    for storage, first, stop in segments(tiles_N3):
        y_TO[order_R[first:stop].long()] += bias_LO[storage]


def norm(
    y: torch.Tensor,
    x: torch.Tensor,
    weight_LD: torch.Tensor,
    replaced_L: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    eps: float,
    unit_offset: bool,
    block_rows: int,
) -> None:
    """Norm the tiles' rows of ``x`` into ``y`` [T, ..., D] where a row's slot replaces the weight.

    A row is x over its root mean square times its slot's weight; the others keep the base's norm.
    Rounded as ``RMSNorm`` rounds. ``x`` may have other than contiguous rows, ``y`` has them.
    """
    if y.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.vocab import TileTables, launch_norm

        tiles = TileTables(order_R, tiles_N3, block_rows)
        launch_norm(y, x, weight_LD, replaced_L, tiles, eps, unit_offset)
        return
    for storage, first, stop in segments(tiles_N3):
        if replaced_L[storage]:
            rows, weight_D = order_R[first:stop].long(), weight_LD[storage]
            wide = x[rows].float()
            wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            if unit_offset:
                y[rows] = (wide * (1.0 + weight_D.float())).to(y.dtype)
            else:
                y[rows] = wide.to(y.dtype) * weight_D


def add_biases(y_TO: torch.Tensor, bias_LO: torch.Tensor, rows: TiledRows) -> None:
    """``add_bias`` as the operator."""
    torch.ops.mstar_lora.add_bias(y_TO, bias_LO, rows.order_R, rows.tiles_N3, rows.block_rows)


for _name, _operator in (
    ("embed", embed),
    ("head_rows", head_rows),
    ("add_bias", add_bias),
    ("norm", norm),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _operator, _device)

    @torch.library.register_fake(f"mstar_lora::{_name}", lib=_LIBRARY)
    def _fake(*arguments: object) -> None:
        return None
