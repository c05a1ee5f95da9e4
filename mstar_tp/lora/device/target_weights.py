"""One target's adapter weights in every slot, and how a layer's deltas are added from them.

Step thread. A target's storage is A [layers, slots, slices * rank, in] and B [layers, slots, rank,
out]: a slot's part is contiguous and as an install copies it, B turned so that a row of it is read
in order. Only the rows of a slot's own rank are ever read.

Legend: T tokens of the step, R rows a delta touches, I input and O output features as this rank
holds them, S slices of the output, N layers, L slots, K max_rank, M = S * K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.kernels.cpu import CpuKernels, Factors
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.lora.device import expert_ops, vocab_ops
from mstar_tp.lora.device.delta_plan import DeltaPlan, GroupedRows, put_rows, select_rows
from mstar_tp.lora.device.device_copies import DeviceQueues
from mstar_tp.lora.device.tiles import TiledRows, column_blocks
from mstar_tp.lora.spec import LoraSpec, LoraTarget
from mstar_tp.lora.stage_rows import RowGrouping


class LayerWeights:
    """One layer of one target, all slots."""

    def __init__(
        self,
        target: TargetWeights,
        layer: int,
        kernels: CpuKernels | None,
    ) -> None:
        self._target = target
        self.grouping = target.grouping
        self._a_LMI = target.a_NLMI[layer]
        self._b_LKO = target.b_NLKO[layer]
        self._bias_LO = target.bias_NLO[layer]
        self._kernels = kernels
        self.factors = Factors(
            a=self._a_LMI.data_ptr(),
            a_slot=self._a_LMI.stride(0),
            b=self._b_LKO.data_ptr(),
            b_slot=self._b_LKO.stride(0),
            ranks=target.ranks_L.data_ptr(),
            ends=target.slice_ends.data_ptr(),
            slices=len(target.slices),
            rank=target.max_rank,
        )

    def linear(
        self,
        weight: LinearWeight,
        bias_O: torch.Tensor | None,
        x_TI: torch.Tensor,
        plan: DeltaPlan,
    ) -> torch.Tensor:
        """The base's product with the deltas of the step's adapter rows.

        It is one kernel where there is one, with the same bits as ``add``.
        """
        grouped, packed, kernels = plan.grouped, weight.packed, self._kernels
        if grouped is None or packed is None or kernels is None or plan.segments:
            return self.add(weight(x_TI, bias_O), x_TI, plan)
        x_TI = x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()
        y_TO = kernels.linear(x_TI, packed, bias_O, weight.shape[0], self.factors, grouped.at)
        return self._add_biases(y_TO, plan)

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """``y`` plus the deltas of the step's adapter rows, in place."""
        for rows, slot in plan.segments:
            if self._target.ranks_of[slot - 1]:
                y_RO = select_rows(y_TO, rows)
                self._add_slot(y_RO, select_rows(x_TI, rows), slot)
                put_rows(y_TO, rows, y_RO)
        if plan.grouped is not None:
            self._add_grouped(y_TO, x_TI, plan.grouped)
        if plan.tiled is not None:
            self._add_tiled(y_TO, x_TI, plan.tiled)
        return self._add_biases(y_TO, plan)

    def _add_biases(self, y_TO: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        if isinstance(plan.biased, TiledRows):
            vocab_ops.add_biases(y_TO, self._bias_LO, plan.biased)
            return y_TO
        for rows, slot in plan.biased:
            y_RO = select_rows(y_TO, rows)
            y_RO.add_(self._bias_LO[slot - 1])
            put_rows(y_TO, rows, y_RO)
        return y_TO

    def _add_slot(self, y_RO: torch.Tensor, x_RI: torch.Tensor, slot: int) -> None:
        """``y += B(A x)`` of one slot's rows, slice by slice."""
        target, rank = self._target, self._target.ranks_of[slot - 1]
        h_RM = x_RI @ self._a_LMI[slot - 1].t()
        for index, columns in enumerate(target.slices):
            first = index * target.max_rank
            b_KO = self._b_LKO[slot - 1, :rank, columns]
            y_RO[:, columns].addmm_(h_RM[:, first : first + rank], b_KO)

    def _add_tiled(self, y_TO: torch.Tensor, x_TI: torch.Tensor, rows: TiledRows) -> None:
        target = self._target
        if not rows.captured and not any(target.ranks_of[slot - 1] for slot in rows.slots):
            return
        assert target.column_blocks is not None, "rows are tiled for the operators alone"
        torch.ops.mstar_lora.apply(
            y_TO,
            x_TI,
            self._a_LMI,
            self._b_LKO,
            rows.order_R,
            rows.tiles_N3,
            target.ranks_L,
            target.column_blocks,
            rows.block_rows,
            rows.invariant,
        )

    def _add_grouped(self, y_TO: torch.Tensor, x_TI: torch.Tensor, rows: GroupedRows) -> None:
        assert self._kernels is not None, "rows are grouped for the kernel alone"
        self._kernels.lora_delta(y_TO, x_TI, self.factors, rows.at)


class TargetWeights:
    """The storage of one target over all its layers."""

    def __init__(
        self,
        spec: LoraSpec,
        target: LoraTarget,
        out_sizes: Sequence[int],
        num_columns: int,
        like: torch.Tensor,
        kernels: CpuKernels | None,
        tiles: bool,
    ) -> None:
        n, slots, rank = target.num_layers, spec.slots, spec.max_rank
        self.max_rank = rank
        self.routed = target.routed
        tokens = target.row_grouping == RowGrouping.TOKENS
        self.grouping = RowGrouping.TOKENS if tokens else target.row_grouping
        ends = torch.tensor(out_sizes).cumsum(0)
        self.slice_ends = ends
        """int64 [S]: where each slice's columns end."""
        self.slices = [
            slice(end - size, end) for end, size in zip(ends.tolist(), out_sizes, strict=True)
        ]
        self.a_NLMI = like.new_zeros(n, slots, len(out_sizes) * rank, num_columns)
        self.b_NLKO = like.new_zeros(n, slots, rank, sum(out_sizes))
        self.bias_NLO = like.new_zeros(n, slots, sum(out_sizes))
        self.ranks_of = [0] * slots
        """Each slot's rank here, 0 where its adapter leaves the target alone,"""
        self.ranks_NL = torch.zeros(
            (n if target.routed else 1, slots), dtype=torch.int64, device=like.device
        )
        self.ranks_L = self.ranks_NL[0]
        """and the same as kernels read it; of experts, once for each."""
        self._biased: set[int] = set()
        """Slots whose bias is not zeros."""
        tiles = tiles or (target.routed and expert_ops.are_taken(like.device))
        self.column_blocks = column_blocks(out_sizes, like.device) if tiles else None
        # Experts are run all at once.
        self.layers = [] if target.routed else [LayerWeights(self, k, kernels) for k in range(n)]

    def write(
        self,
        slot: int,
        rank: int,
        a_NMI: torch.Tensor | None,
        b_NOK: torch.Tensor | None,
        bias_NO: torch.Tensor | None,
        queues: DeviceQueues,
    ) -> None:
        """Make the slot hold these weights (None: nothing) and no others."""
        index = slot - 1
        if bias_NO is not None:
            queues.copy((self.bias_NLO[:, index], bias_NO))
            self._biased.add(slot)
        elif slot in self._biased:
            queues.fill(self.bias_NLO[:, index], 0)
            self._biased.discard(slot)
        before = self.ranks_of[index]
        now = self.ranks_of[index] = 0 if a_NMI is None else rank
        if now != before:
            queues.fill(self.ranks_NL[:, index], now)
        if a_NMI is not None and b_NOK is not None:
            # What lies past the rank is zeros in the copy, and nobody reads it.
            queues.copy(
                (self.a_NLMI[:, index], a_NMI),
                (self.b_NLKO[:, index], b_NOK.transpose(1, 2)),
            )

    def fill(self, seed: int) -> None:
        """Small random weights of the largest rank in every slot."""
        generator = torch.Generator(self.a_NLMI.device).manual_seed(seed)
        for weights in (self.a_NLMI, self.b_NLKO):
            weights.normal_(std=0.05, generator=generator)
        self.ranks_of = [self.max_rank] * len(self.ranks_of)
        self.ranks_L.fill_(self.max_rank)

    def empty(self) -> None:
        """Bring every slot back to what it was before any install."""
        for weights in (self.a_NLMI, self.b_NLKO, self.ranks_L):
            weights.zero_()
        self.ranks_of = [0] * len(self.ranks_of)
