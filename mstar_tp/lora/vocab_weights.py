"""What adapters change at the two ends of a model, in their slots: the embedding and the head.

Step thread. Each end keeps, a slot, the two factors of this rank's part of the vocabulary, and
rows that replace the base weight's (trained tokens, or a whole matrix). Rows of the step are
worked through slot by slot: a step names few adapters, and most leave both ends alone.

Legend: T tokens of the step, N sampled rows, R those of one slot, D hidden size, P ids of this
rank's part of the vocabulary, K max_rank, L slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mstar_tp.distributed.shard import vocab_part
from mstar_tp.lora.adapter import LoadedAdapter, ReplacedRows
from mstar_tp.lora.delta_plan import Segment, put_rows, select_rows
from mstar_tp.lora.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec, LoraTarget


class _VocabEnd:
    """One end, all slots; zeros until written."""

    def __init__(
        self, spec: LoraSpec, target: LoraTarget, rank: int, world_size: int, like: torch.Tensor
    ) -> None:
        self.name = target.name
        self.part_size, part = vocab_part(target.vocab_size, rank, world_size)
        self.first = rank * self.part_size
        (_, *a), (_, *b) = slot_shapes(spec, target, rank, world_size)
        most = min(spec.max_saved_rows, len(part))
        self._a = like.new_zeros(spec.slots, *a)
        self._b = like.new_zeros(spec.slots, *b)
        self._bias = like.new_zeros(spec.slots, b[0])
        self._ids = torch.zeros((spec.slots, most), dtype=torch.int64, device=like.device)
        self._rows = like.new_zeros(spec.slots, most, target.hidden_size)
        self._num_rows = [0] * spec.slots
        self._factored: set[int] = set()
        """Slots whose factors are not all zeros."""

    def write(self, slot: int, adapter: LoadedAdapter) -> bool:
        """Make the slot hold the adapter and nothing else; whether it changes this end."""
        a, b = adapter.a.get(self.name), adapter.b.get(self.name)
        rows = adapter.rows.get(self.name)
        if a is not None and b is not None:
            self._a[slot - 1].copy_(a[0], non_blocking=True)
            self._b[slot - 1].copy_(b[0], non_blocking=True)
            bias = adapter.bias.get(self.name)
            if bias is None:
                self._bias[slot - 1].zero_()
            else:
                self._bias[slot - 1].copy_(bias[0], non_blocking=True)
            self._factored.add(slot)
        elif slot in self._factored:
            for weights in (self._a, self._b, self._bias):
                weights[slot - 1].zero_()
            self._factored.discard(slot)
        self._write_rows(slot, rows)
        return a is not None or rows is not None

    def _write_rows(self, slot: int, rows: ReplacedRows | None) -> None:
        count = 0 if rows is None else len(rows.ids)
        old, self._num_rows[slot - 1] = self._num_rows[slot - 1], count
        if rows is not None:
            self._ids[slot - 1, :count].copy_(rows.ids, non_blocking=True)
            self._rows[slot - 1, :count].copy_(rows.weight, non_blocking=True)
        if old > count:
            self._rows[slot - 1, count:old].zero_()

    def _replaced(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, ascending and counted from this part's first; their rows)."""
        count = self._num_rows[slot - 1]
        return self._ids[slot - 1, :count], self._rows[slot - 1, :count]


class EmbeddingWeights(_VocabEnd):
    """An embedding's: A [L, P, K], a row a token; B [L, D, K]."""

    def add(self, y_TD: torch.Tensor, ids_T: torch.Tensor, groups: Sequence[Segment]) -> None:
        """``y += delta(ids)`` in place for the ids of this rank's part; the others' rows of ``y``
        are zeros, and stay so.
        """
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

    def _add_factors(self, y_RD: torch.Tensor, here_R: torch.Tensor, slot: int) -> None:
        other_R = (here_R < 0) | (here_R >= self.part_size)
        h_RK = F.embedding(here_R.masked_fill(other_R, 0), self._a[slot - 1])
        h_RK = h_RK.masked_fill(other_R.unsqueeze(-1), 0)
        y_RD.addmm_(h_RK, self._b[slot - 1].t())

    def _replace(self, y_RD: torch.Tensor, here_R: torch.Tensor, slot: int) -> None:
        ids, weight = self._replaced(slot)
        at_R = torch.searchsorted(ids, here_R).clamp_(max=len(ids) - 1)
        hit_R = ids[at_R] == here_R
        y_RD.copy_(torch.where(hit_R.unsqueeze(-1), weight[at_R], y_RD))


class HeadWeights(_VocabEnd):
    """A head's: A [L, K, D]; B [L, P, K]; a bias [L, P]."""

    def add(self, y_NP: torch.Tensor, x_ND: torch.Tensor, groups: Sequence[Segment]) -> None:
        """``y += delta(x)`` in place, then the logits of replaced rows in the base's place."""
        for rows, slot in groups:
            factored, replaces = slot in self._factored, self._num_rows[slot - 1] > 0
            if not factored and not replaces:
                continue
            y_RP, x_RD = select_rows(y_NP, rows), select_rows(x_ND, rows)
            if factored:
                h_RK = x_RD @ self._a[slot - 1].t()
                y_RP.addmm_(h_RK, self._b[slot - 1].t()).add_(self._bias[slot - 1])
            if replaces:
                ids, weight = self._replaced(slot)
                y_RP.index_copy_(1, ids, x_RD @ weight.t())
            put_rows(y_NP, rows, y_RP)
