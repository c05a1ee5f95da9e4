"""The token embedding and the output head, split along the vocabulary.

The vocabulary is padded to equal parts; a padded id has a zero row, is never looked up, and is cut
off the logits before anyone samples from them.

Legend: T tokens, N sampled rows, D hidden size, V vocabulary (P: this rank's part of it, padding
included).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mstar_tp.common.errors import CheckpointError
from mstar_tp.distributed.shard import vocab_part
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.layers.weights import Placement, WeightReader, join

_COMPARE_ELEMENTS = 1 << 20
"""Weights of a tied head compared at a time."""


class VocabShard:
    """The ``size`` ids from ``first`` that a rank holds.

    ``rows`` are the real ones, none where its part is all padding.
    """

    def __init__(self, vocab_size: int, place: Placement) -> None:
        self.vocab_size = vocab_size
        self.size, self.rows = vocab_part(vocab_size, place.group.rank, place.group.world_size)
        self.first = place.group.rank * self.size

    def load(
        self, reader: WeightReader, key: str, hidden_size: int, place: Placement
    ) -> torch.Tensor:
        """This rank's rows of the weight ``key``, zeros where padded: [P, D] on the device."""
        weight_PD = torch.empty((self.size, hidden_size), dtype=place.dtype)
        weight_PD[len(self.rows) :].zero_()
        shape = (self.vocab_size, hidden_size)
        reader.read_rows(key, shape, self.rows, weight_PD[: len(self.rows)])
        return weight_PD.to(place.device)


class VocabParallelEmbedding(nn.Module):
    """Token ids to hidden states; each rank looks up the ids it holds and the group sums."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, *, name: str) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.place = place
        self.group = place.group
        self.name = name
        self.shard = VocabShard(vocab_size, place)
        self.weight: torch.Tensor | None = None

    def load(self, reader: WeightReader, parent: str) -> None:
        key = join(parent, f"{self.name}.weight")
        self.weight = self.shard.load(reader, key, self.hidden_size, self.place)

    def local(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states of the ids this rank holds, zeros for the others: [T] -> [T, D].

        No collective.
        """
        assert self.weight is not None, f"{self.name} was never loaded"
        if self.group.world_size == 1:
            return F.embedding(ids_T, self.weight)
        here_T = ids_T - self.shard.first
        other_T = (here_T < 0) | (here_T >= self.shard.size)
        out_TD = F.embedding(here_T.masked_fill(other_T, 0), self.weight)
        return out_TD.masked_fill_(other_T.unsqueeze(-1), 0)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, D] on every rank. Collective on ``group``: one all_reduce."""
        return self.group.all_reduce(self.local(ids_T))


class ParallelHead(nn.Module):
    """Hidden states to logits over the real vocabulary, on rank 0.

    Tied when built with an embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        *,
        name: str,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.place = place
        self.group = place.group
        self.name = name
        self.shard = VocabShard(vocab_size, place)
        # In a tuple, so that the embedding is not registered twice as a child.
        self._tied = (tied,)
        self.weight: LinearWeight | None = None

    @property
    def is_tied(self) -> bool:
        return self._tied[0] is not None

    def load(self, reader: WeightReader, parent: str) -> None:
        """Read this rank's rows, or share the embedding's (loaded before).

        Raises:
            CheckpointError: the head is tied, but the checkpoint holds another weight for it.
        """
        key = join(parent, f"{self.name}.weight")
        tied = self._tied[0]
        if tied is not None:
            assert tied.weight is not None, "a tied head loads after its embedding"
            if reader.has(key):
                self._check_same(reader, key, tied.weight)
            self.weight = LinearWeight(tied.weight)
            return
        self.weight = LinearWeight(self.shard.load(reader, key, self.hidden_size, self.place))

    def _check_same(self, reader: WeightReader, key: str, embedding_PD: torch.Tensor) -> None:
        """A tied checkpoint may repeat the embedding as its head, but hold nothing else there."""
        shape = (self.shard.vocab_size, self.hidden_size)
        rows, step = self.shard.rows, max(1, _COMPARE_ELEMENTS // self.hidden_size)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            mine_CD = embedding_PD[first : first + len(part)]
            other_CD = torch.empty(mine_CD.shape, dtype=mine_CD.dtype)
            reader.read_rows(key, shape, part, other_CD)
            if mine_CD.is_meta:
                continue  # headers alone are read: there are no values
            if not torch.equal(other_CD, mine_CD.cpu()):
                raise CheckpointError(
                    f"{key} differs from the embedding in rows {part.start} to {part.stop - 1}, "
                    "but config.json ties them: "
                    f"set tie_word_embeddings to false or drop the key"
                )

    def pack(self) -> None:
        """Lay the weight out for this device's GEMM.

        A tied head that is packed holds a copy, beside the rows that the embedding looks up: a
        packed GEMM reads the vocabulary about twice as fast, every step.
        """
        assert self.weight is not None, f"{self.name} was never loaded"
        self.weight.pack()

    def local(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits of the ids this rank holds, padding included: [N, D] -> [N, P]. No collective."""
        assert self.weight is not None, f"{self.name} was never loaded"
        out: torch.Tensor = self.weight(hidden_ND)
        return out

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor | None:
        """[N, D] -> [N, V] on rank 0, None elsewhere. Collective on ``group``: one gather."""
        return self.finish(self.local(hidden_ND))

    def finish(self, local_NP: torch.Tensor) -> torch.Tensor | None:
        """Every rank's logits side by side on rank 0, padding cut off.

        Collective on ``group``: one gather.
        """
        logits = self.group.gather(local_NP)
        return None if logits is None else logits[:, : self.shard.vocab_size]
