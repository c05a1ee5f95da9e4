"""Deltas of routed experts: each row of an expert's linear with its own slot's factors.

The experts of one layer are one target, an expert a layer of its storage. Which rows go to which
expert is known only once the layer's router has run, so rows are grouped layer by layer. Step
thread.

Legend: T tokens of the step, K experts a token, R rows, P pairs of an adapter's token and an
expert, G groups of pairs with one slot and expert, E experts, L slots, I and O features, M rows of
A.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from mstar_tp.kernels.cpu import CpuKernels, Factors, RowsAt
from mstar_tp.kernels.triton import launch
from mstar_tp.lora.device import vocab_ops
from mstar_tp.lora.device.expert_ops import TiledPairs
from mstar_tp.lora.device.tiles import TiledRows


class AdapterPairs(NamedTuple):
    """The step's adapter rows at one layer, those of one slot and expert side by side. All int64.

    ``rows`` [P] are places among the layer's rows; ``storage`` [G] is expert * L + slot - 1 of each
    group, whose pairs are rows[indptr[g]:indptr[g + 1]].
    """

    rows: torch.Tensor
    storage: torch.Tensor
    indptr: torch.Tensor


def adapter_pairs(
    slots_T: torch.Tensor, experts_TK: torch.Tensor, places_TK: torch.Tensor, num_slots: int
) -> AdapterPairs | None:
    """Pairs of adapters from each token's slot (0: none), experts and rows; None if all are 0."""
    tokens = slots_T.nonzero().flatten()
    if not len(tokens):
        return None
    storage_P = (experts_TK[tokens] * num_slots + slots_T[tokens, None] - 1).flatten()
    storage_P, order = storage_P.sort(stable=True)
    storage, counts = torch.unique_consecutive(storage_P, return_counts=True)
    ends = counts.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    return AdapterPairs(places_TK[tokens].flatten()[order], storage, indptr)


class ExpertStorage(Protocol):
    """One target's slots as experts read them.

    These are ``a_NLMI`` [E, L, M, I], ``b_NLKO`` [E, L, max_rank, O], ``bias_NLO`` [E, L, O], each
    slot's rank and the output's slices; for the operators the ranks once for each expert, and
    blocks of columns.
    """

    max_rank: int
    a_NLMI: torch.Tensor  # noqa: N815
    b_NLKO: torch.Tensor  # noqa: N815
    bias_NLO: torch.Tensor  # noqa: N815
    ranks_of: list[int]
    ranks_L: torch.Tensor  # noqa: N815
    ranks_NL: torch.Tensor  # noqa: N815
    column_blocks: torch.Tensor | None
    slices: list[slice]
    slice_ends: torch.Tensor


class ExpertWeights:
    """All experts of one layer, one of their linears, all slots."""

    def __init__(self, target: ExpertStorage, kernels: CpuKernels | None) -> None:
        self._target = target
        self._kernels = kernels
        self.num_slots = target.a_NLMI.shape[1]
        self._a_GMI = target.a_NLMI.flatten(0, 1)
        self._b_GKO = target.b_NLKO.flatten(0, 1)
        self._bias_GO = target.bias_NLO.flatten(0, 1)

    def add(self, y_RO: torch.Tensor, x_RI: torch.Tensor, pairs: AdapterPairs | TiledPairs) -> None:
        """Add the deltas of the pairs' rows to ``y``, in place.

        For tiled pairs ``y`` has a row for each of the step's pairs, and ``x`` the same or one a
        token.
        """
        if isinstance(pairs, TiledPairs):
            self._add_tiled(y_RO, x_RI, pairs)
        elif any(self._target.ranks_of):
            if self._kernels is not None:
                self._add_grouped(self._kernels, y_RO, x_RI, pairs)
            else:
                self._add_each(y_RO, x_RI, pairs)

    def add_bias(self, y_RO: torch.Tensor, pairs: AdapterPairs | TiledPairs) -> None:
        """``y`` plus the biases inside LoRA of the pairs' rows, in place."""
        if isinstance(pairs, TiledPairs):
            tiles = TiledRows(pairs.pairs, pairs.tiles, pairs.block_rows, ())
            vocab_ops.add_biases(y_RO, self._bias_GO, tiles)
            return
        storage_P = pairs.storage.repeat_interleave(pairs.indptr.diff())
        y_RO.index_add_(0, pairs.rows, self._bias_GO[storage_P])

    def _add_tiled(self, y_PO: torch.Tensor, x_RI: torch.Tensor, pairs: TiledPairs) -> None:
        target, rows = self._target, pairs.block_rows
        assert target.column_blocks is not None, "pairs are tiled for the operators alone"
        order = pairs.pairs if len(x_RI) == len(y_PO) else pairs.tokens
        packed, ranks_G = self._a_GMI.shape[1], target.ranks_NL.flatten()
        sizes = launch.shrink_sizes(packed, rows, self._a_GMI.element_size())
        splits = launch.splits(len(pairs.tiles), packed, x_RI.shape[1], sizes, invariant=False)
        h_PRM = torch.ops.mstar_lora.shrink(
            x_RI, self._a_GMI, order, pairs.tiles, ranks_G, target.max_rank, rows, splits
        )
        torch.ops.mstar_lora.expand(
            y_PO,
            h_PRM,
            self._b_GKO,
            pairs.pairs,
            pairs.tiles,
            ranks_G,
            target.column_blocks,
            rows,
        )

    def _add_each(self, y_RO: torch.Tensor, x_RI: torch.Tensor, pairs: AdapterPairs) -> None:
        bounds = pairs.indptr.tolist()
        for group, place in enumerate(pairs.storage.tolist()):
            rank = self._target.ranks_of[place % self.num_slots]
            if not rank:
                continue
            rows = pairs.rows[bounds[group] : bounds[group + 1]]
            h_PM = x_RI[rows] @ self._a_GMI[place].t()
            y_PO = y_RO[rows]
            for index, columns in enumerate(self._target.slices):
                first = index * self._target.max_rank
                b_KO = self._b_GKO[place, :rank, columns]
                y_PO[:, columns].addmm_(h_PM[:, first : first + rank], b_KO)
            y_RO.index_copy_(0, rows, y_PO)

    def _add_grouped(
        self, kernels: CpuKernels, y_RO: torch.Tensor, x_RI: torch.Tensor, pairs: AdapterPairs
    ) -> None:
        target, count = self._target, len(pairs.rows)
        ranks_G = target.ranks_L.repeat(target.a_NLMI.shape[0])
        hidden = torch.empty(count * self._a_GMI.shape[1])
        factors = Factors(
            a=self._a_GMI.data_ptr(),
            a_slot=self._a_GMI.stride(0),
            b=self._b_GKO.data_ptr(),
            b_slot=self._b_GKO.stride(0),
            ranks=ranks_G.data_ptr(),
            ends=target.slice_ends.data_ptr(),
            slices=len(target.slices),
            rank=target.max_rank,
        )
        rows = RowsAt.of(pairs.rows, pairs.storage, pairs.indptr, hidden)
        kernels.lora_delta(y_RO, x_RI, factors, rows)
