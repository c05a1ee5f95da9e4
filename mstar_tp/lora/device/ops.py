"""Adapter deltas as torch operators, each one opaque node to torch.compile.

``torch.ops.mstar_lora.shrink``, ``expand`` and ``apply``. On CUDA they are Triton kernels; on CPU
tensors torch's GEMMs, a slot's rows at a time, or the Triton kernels where Triton interprets
(``TRITON_INTERPRET=1``). ``reference_apply`` is a plain function and no registration: what tests
and a pool without kernels use.

Legend: T tokens of the step, I input and O output features, L slots, S slices, K max_rank, M =
S * K, R rows in the order, N tiles, C column blocks, P splits. ``order_R``, ``tiles_N3``: see
``lora.tiles``; ``blocks_C3``: see ``column_blocks``; ``ranks_L``: each slot's own rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from mstar_tp.kernels.triton import launch

_LIBRARY = torch.library.Library("mstar_lora", "DEF")
_TABLES = "Tensor order, Tensor tiles, Tensor ranks"
_LIBRARY.define(
    f"shrink(Tensor x, Tensor a, {_TABLES}, int max_rank, int block_rows, int splits) -> Tensor"
)
_LIBRARY.define(
    f"expand(Tensor(a!) y, Tensor h, Tensor b, {_TABLES}, Tensor blocks, int block_rows) -> ()"
)
_LIBRARY.define(
    f"apply(Tensor(a!) y, Tensor x, Tensor a, Tensor b, {_TABLES}, Tensor blocks, int block_rows, "
    "bool invariant) -> ()"
)


@cache
def triton_is_here() -> bool:
    """Tell whether the kernels can be had for a CUDA device."""
    try:
        import mstar_tp.kernels.triton.lora.deltas  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def interprets() -> bool:
    """Tell whether Triton's interpreter runs the kernels, so that CPU tensors may take them."""
    if not triton_is_here():
        return False
    from mstar_tp.kernels.triton.dot import widens

    return widens()


def shrink(
    x_TI: torch.Tensor,
    a_LMI: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    max_rank: int,
    block_rows: int,
    splits: int,
) -> torch.Tensor:
    """Each row's ``A x`` in ``splits`` parts: float32 [P, R, M].

    A row's first S * rank elements count, packed by its slot's rank: slice s begins at s * rank.
    What lies past them, and past the last tile, is not written.
    """
    h_PRM = x_TI.new_empty((splits, len(order_R), a_LMI.shape[1]), dtype=torch.float32)
    if x_TI.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.deltas import launch_shrink

        launch_shrink(h_PRM, x_TI, a_LMI, order_R, tiles_N3, ranks_L, max_rank, block_rows)
        return h_PRM
    h_PRM[1:] = 0
    slices = a_LMI.shape[1] // max_rank
    for storage, first, stop in segments(tiles_N3):
        rank = int(ranks_L[storage])
        a_SKI = a_LMI[storage].unflatten(0, (slices, max_rank))[:, :rank]
        rows = order_R[first:stop].long()
        h_PRM[0, first:stop, : slices * rank] = x_TI[rows] @ a_SKI.flatten(0, 1).t()
    return h_PRM


def expand(
    y_TO: torch.Tensor,
    h_PRM: torch.Tensor,
    b_LKO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    blocks_C3: torch.Tensor,
    block_rows: int,
) -> None:
    """``y += B h`` in place on the tiles' rows, h as ``shrink`` leaves it."""
    if y_TO.is_cuda or interprets():
        from mstar_tp.kernels.triton.lora.deltas import launch_expand

        launch_expand(y_TO, h_PRM, b_LKO, order_R, tiles_N3, ranks_L, blocks_C3, block_rows)
        return
    slices = _slices(blocks_C3)
    for storage, first, stop in segments(tiles_N3):
        rank, rows = int(ranks_L[storage]), order_R[first:stop].long()
        h_RM = h_PRM[:, first:stop].sum(0).to(b_LKO.dtype)
        y_RO = y_TO[rows]
        for part, columns in slices.items():
            b_KO = b_LKO[storage, :rank, columns]
            y_RO[:, columns].addmm_(h_RM[:, part * rank : (part + 1) * rank], b_KO)
        y_TO.index_copy_(0, rows, y_RO)


def apply(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LMI: torch.Tensor,
    b_LKO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    blocks_C3: torch.Tensor,
    block_rows: int,
    invariant: bool,
) -> None:
    """``y += B(A x)`` in place on the tiles' rows, all slices: one or two launches, by shapes."""
    max_rank, packed = b_LKO.shape[1], a_LMI.shape[1]
    size = a_LMI.element_size()
    tables = order_R, tiles_N3, ranks_L
    on_kernels = y_TO.is_cuda or interprets()
    if on_kernels and launch.is_fused(max_rank, x_TI.shape[1], size, block_rows):
        from mstar_tp.kernels.triton.lora.deltas import launch_fused

        launch_fused(y_TO, x_TI, a_LMI, b_LKO, *tables, blocks_C3, block_rows)
        return
    sizes = launch.shrink_sizes(packed, block_rows, size)
    splits = launch.splits(len(tiles_N3), packed, x_TI.shape[1], sizes, invariant=invariant)
    h_PRM = shrink(x_TI, a_LMI, *tables, max_rank, block_rows, splits if on_kernels else 1)
    expand(y_TO, h_PRM, b_LKO, *tables, blocks_C3, block_rows)


def reference_apply(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LMI: torch.Tensor,
    b_LKO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    blocks_C3: torch.Tensor,
) -> torch.Tensor:
    """``y + B(A x)`` in float64, row by row, of tables on the CPU: the oracle. A new tensor."""
    max_rank, out = b_LKO.shape[1], y_TO.double()
    slices = _slices(blocks_C3)
    for storage, first, stop in tiles_N3.tolist():
        rank = int(ranks_L[storage])
        for row in order_R[first:stop].tolist():
            for part, columns in slices.items():
                a_KI = a_LMI[storage, part * max_rank : part * max_rank + rank].double()
                b_KO = b_LKO[storage, :rank, columns].double()
                out[row, columns] += (a_KI @ x_TI[row].double()) @ b_KO
    return out


def segments(tiles_N3: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """A slot's tiles as one: its storage, first and last-plus-one row; empty tiles left out."""
    segments: dict[int, list[int]] = {}
    for storage, first, stop in tiles_N3.tolist():
        if first < stop:
            segments.setdefault(storage, [first, stop])[1] = stop
    return ((storage, first, stop) for storage, (first, stop) in segments.items())


def _slices(blocks_C3: torch.Tensor) -> dict[int, slice]:
    """Each slice's columns."""
    slices: dict[int, slice] = {}
    for part, first, stop in blocks_C3.tolist():
        slices[part] = slice(slices[part].start if part in slices else first, stop)
    return slices


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("shrink", shrink, _device)
    _LIBRARY.impl("expand", expand, _device)
    _LIBRARY.impl("apply", apply, _device)


@torch.library.register_fake("mstar_lora::shrink", lib=_LIBRARY)
def _fake_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    ranks: torch.Tensor,
    max_rank: int,
    block_rows: int,
    splits: int,
) -> torch.Tensor:
    return x.new_empty((splits, order.shape[0], a.shape[1]), dtype=torch.float32)


@torch.library.register_fake("mstar_lora::expand", lib=_LIBRARY)
def _fake_expand(*arguments: object) -> None:
    return None


@torch.library.register_fake("mstar_lora::apply", lib=_LIBRARY)
def _fake_apply(*arguments: object) -> None:
    return None
