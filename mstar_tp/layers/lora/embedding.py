"""The embedding's and the head's LoRA twins.

They have the same weights, and add the step's adapters before any collective.

Bound as the parallel linears are (see ``lora_linear``).
"""

from __future__ import annotations

import torch

from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.lora.device.deltas import LoraEmbeddingDelta, LoraHeadDelta


class VocabParallelEmbeddingWithLora(VocabParallelEmbedding):
    """Each rank changes the ids it holds, so that the sum over the ranks has each change once."""

    lora_delta: LoraEmbeddingDelta

    def local(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.lora_delta(super().local(ids_T), ids_T)


class ParallelHeadWithLora(ParallelHead):
    """A head whose B's rows, and rows in the base's place, are split as its own rows are.

    A tied head keeps the embedding's weight as its base, and has changes of its own.
    """

    lora_delta: LoraHeadDelta

    def local(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return self.lora_delta(super().local(hidden_ND), hidden_ND)
