"""Adapter weights of the embedding and the head, in their slots.

Step thread. Each end keeps, a slot, the two factors of this rank's part of the vocabulary, and
rows that replace the base weight's (trained tokens, or a whole matrix). On a device with kernels
of its own they take a step's rows as tiles; elsewhere rows are worked through slot by slot: a step
names few adapters, and most leave both ends alone.

Legend: T tokens of the step, N sampled rows, R those of one slot, D hidden size, P ids of this
rank's part of the vocabulary, K max_rank, L slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar_tp.distributed.shard import vocab_part
from mstar_tp.lora.device import vocab_ops
from mstar_tp.lora.device.delta_plan import RowsBySlot, put_rows, select_rows
from mstar_tp.lora.device.device_copies import DeviceQueues
from mstar_tp.lora.device.tiles import TiledRows, column_blocks
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter, ReplacedRows
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec, LoraTarget


class _VocabWeights:
    """One end, all slots; zeros until written."""

    def __init__(
        self,
        spec: LoraSpec,
        target: LoraTarget,
        rank: int,
        world_size: int,
        like: torch.Tensor,
        tiles: bool,
    ) -> None:
        self.name = target.name
        self.part_size, part = vocab_part(target.vocab_size, rank, world_size)
        self.first = rank * self.part_size
        (_, *a), (_, out, max_rank) = slot_shapes(spec, target, rank, world_size)
        most, slots, device = min(spec.max_saved_rows, len(part)), spec.slots, like.device
        self._a = like.new_zeros(slots, *a)
        self._b = like.new_zeros(slots, max_rank, out)
        self._bias = like.new_zeros(slots, out)
        self._ids = torch.zeros((slots, most), dtype=torch.int64, device=device)
        self._rows = like.new_zeros(slots, most, target.hidden_size)
        self._num_rows = [0] * slots
        """Each slot's replaced rows,"""
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        """and the same as kernels read it."""
        self._factored: set[int] = set()
        """Slots whose factors are not all zeros,"""
        self._ranks = torch.zeros(slots, dtype=torch.int64, device=device)
        """and their ranks, as kernels read them."""
        self._biased: set[int] = set()
        self._columns = column_blocks((out,), device) if tiles else None

    def write(self, slot: int, adapter: LoadedAdapter, queues: DeviceQueues) -> bool:
        """Make the slot hold the adapter and nothing else; whether it changes this end."""
        index = slot - 1
        a, b = adapter.a.get(self.name), adapter.b.get(self.name)
        bias, rows = adapter.bias.get(self.name), adapter.rows.get(self.name)
        if a is not None and b is not None:
            queues.copy((self._a[index], a[0]), (self._b[index], b[0].t()))
            queues.fill(self._ranks[index], adapter.lora_rank)
            self._factored.add(slot)
        elif slot in self._factored:
            for weights in (self._a, self._b, self._ranks):
                queues.fill(weights[index], 0)
            self._factored.discard(slot)
        if bias is not None:
            queues.copy((self._bias[index], bias[0]))
            self._biased.add(slot)
        elif slot in self._biased:
            queues.fill(self._bias[index], 0)
            self._biased.discard(slot)
        self._write_rows(index, rows, queues)
        return a is not None or rows is not None

    def _write_rows(self, index: int, rows: ReplacedRows | None, queues: DeviceQueues) -> None:
        count = 0 if rows is None else len(rows.ids)
        old, self._num_rows[index] = self._num_rows[index], count
        if rows is not None:
            queues.copy((self._ids[index, :count], rows.ids))
            queues.copy((self._rows[index, :count], rows.weight))
        if old > count:
            queues.fill(self._rows[index, count:old], 0)
        if old != count:
            queues.fill(self._counts[index], count)

    def _replaced(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, ascending and counted from this part's first; their rows)."""
        count = self._num_rows[slot - 1]
        return self._ids[slot - 1, :count], self._rows[slot - 1, :count]


class EmbeddingWeights(_VocabWeights):
    """An embedding's: A [L, P, K], a row a token; B [L, K, D]."""

    def add(self, y_TD: torch.Tensor, ids_T: torch.Tensor, groups: RowsBySlot) -> None:
        """Add ``delta(ids)`` to ``y`` in place for the ids of this rank's part.

        The others' rows of ``y`` are zeros, and stay so.
        """
        if isinstance(groups, TiledRows):
            self._add_tiled(y_TD, ids_T, groups)
            return
        for rows, slot in groups:
            factored, replaces = slot in self._factored, self._num_rows[slot - 1] > 0
            if not factored and not replaces:
                continue
            y_RD = select_rows(y_TD, rows)
            here_R = select_rows(ids_T, rows) - self.first
            if factored:
                self._add_factors(y_RD, here_R, slot)
            if replaces:
                self._replace(y_RD, here_R, slot)
            put_rows(y_TD, rows, y_RD)

    def _add_tiled(self, y_TD: torch.Tensor, ids_T: torch.Tensor, rows: TiledRows) -> None:
        torch.ops.mstar_lora.embed(
            y_TD,
            ids_T,
            self._a,
            self._b,
            self._ids,
            self._rows,
            self._counts,
            rows.order_R,
            rows.tiles_N3,
            self._ranks,
            self.first,
            rows.block_rows,
        )

    def _add_factors(self, y_RD: torch.Tensor, here_R: torch.Tensor, slot: int) -> None:
        other_R = (here_R < 0) | (here_R >= self.part_size)
        h_RK = F.embedding(here_R.masked_fill(other_R, 0), self._a[slot - 1])
        h_RK = h_RK.masked_fill(other_R.unsqueeze(-1), 0)
        y_RD.addmm_(h_RK, self._b[slot - 1])

    def _replace(self, y_RD: torch.Tensor, here_R: torch.Tensor, slot: int) -> None:
        ids, weight = self._replaced(slot)
        at_R = torch.searchsorted(ids, here_R).clamp_(max=len(ids) - 1)
        hit_R = ids[at_R] == here_R
        y_RD.copy_(torch.where(hit_R.unsqueeze(-1), weight[at_R], y_RD))


class HeadWeights(_VocabWeights):
    """A head's: A [L, K, D]; B [L, K, P]; a bias [L, P]."""

    def add(self, y_NP: torch.Tensor, x_ND: torch.Tensor, groups: RowsBySlot) -> None:
        """``y += delta(x)`` in place, then the logits of replaced rows in the base's place."""
        if isinstance(groups, TiledRows):
            self._add_tiled(y_NP, x_ND, groups)
            return
        for rows, slot in groups:
            factored, replaces = slot in self._factored, self._num_rows[slot - 1] > 0
            if not factored and not replaces:
                continue
            y_RP, x_RD = select_rows(y_NP, rows), select_rows(x_ND, rows)
            if factored:
                h_RK = x_RD @ self._a[slot - 1].t()
                y_RP.addmm_(h_RK, self._b[slot - 1]).add_(self._bias[slot - 1])
            if replaces:
                ids, weight = self._replaced(slot)
                y_RP.index_copy_(1, ids, x_RD @ weight.t())
            put_rows(y_NP, rows, y_RP)

    def _add_tiled(self, y_NP: torch.Tensor, x_ND: torch.Tensor, rows: TiledRows) -> None:
        tables = rows.order_R, rows.tiles_N3
        if not self._factored.isdisjoint(rows.slots):
            assert self._columns is not None, "rows are tiled for the operators alone"
            torch.ops.mstar_lora.apply(
                y_NP,
                x_ND,
                self._a,
                self._b,
                *tables,
                self._ranks,
                self._columns,
                rows.block_rows,
                rows.invariant,
            )
        if not self._biased.isdisjoint(rows.slots):
            vocab_ops.add_biases(y_NP, self._bias, rows)
        if any(self._num_rows[slot - 1] for slot in rows.slots):
            saved = self._ids, self._rows, self._counts
            torch.ops.mstar_lora.head_rows(y_NP, x_ND, *saved, *tables, rows.block_rows)
