"""Groups of ranks: collectives on tensors, and agreements on small integers.

Collectives are entered by the step thread alone once the rank serves (start-up runs them on the
main thread before the step thread exists). Every rank of a group calls every collective, in the
same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist


class AgreeOp(Enum):
    MIN = "min"
    MAX = "max"


class CommGroup(Protocol):
    """A group of ranks this process belongs to."""

    rank: int
    world_size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the group, in place; returns ``x``. Collective."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate every rank's ``x`` along ``dim``, in rank order. Collective."""
        ...

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """Gather as all_gather does, but to rank 0 only; None elsewhere. Collective."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x`` into every rank's ``x``, in place; returns ``x``. Collective."""
        ...

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        """Element-wise minimum (or maximum) of each rank's int64 ``values``. Collective.

        The same list on every rank. Needs no device: it runs over the group's gloo twin.
        """
        ...


class SingleGroup:
    """A group of one rank: every collective answers at once."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        return list(values)


class TorchGroup:
    """A group over torch.distributed.

    ``group`` carries tensors (NCCL or gloo), ``cpu_group`` agreements (always gloo). Strided
    tensors go through a dense copy: gloo would take the first bytes of their storage, silently.
    """

    def __init__(self, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._cpu_group = cpu_group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.contiguous()
        dist.all_reduce(dense, group=self._group)
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(x, parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=dim)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.contiguous()
        dist.broadcast(dense, group=self._group, group_src=0)
        return x if dense is x else x.copy_(dense)

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        if self._cpu_group is None:
            raise ValueError(
                "agree needs a gloo twin of this group: "
                "build the group through distributed.start.init_groups"
            )
        votes = torch.tensor(list(values), dtype=torch.int64)
        reduce_op = dist.ReduceOp.MIN if op is AgreeOp.MIN else dist.ReduceOp.MAX
        dist.all_reduce(votes, op=reduce_op, group=self._cpu_group)
        return votes.tolist()


class JointGroups:
    """The groups a rank of one tensor-parallel block belongs to: so far, the block itself."""

    def __init__(self, tp: CommGroup) -> None:
        self.tp = tp

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        """Agreement over the whole block. Collective: every rank of it, in the same order."""
        return self.tp.agree(values, op)

    def same(self, values: Sequence[int]) -> list[bool]:
        """Return whether all ranks passed the same number, element by element.

        Collective.
        """
        votes = self.agree([*values, *(-v for v in values)])
        half = len(values)
        return [votes[i] == -votes[half + i] for i in range(half)]
