"""Linears split over a tensor-parallel group.

A column-parallel linear holds rows of its weight (output features), a row-parallel one columns
(input features) and sums over the group. ``forward`` is ``local`` (this rank's GEMM and bias) and
then at most one collective: a subclass that serves adapters adds its delta between the two.

Legend: T tokens of the step, I input features, O output features, both as this rank holds them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from mstar_tp.common.errors import ConfigError
from mstar_tp.distributed.shard import OutSlice, shard_range
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.layers.weights import Placement, WeightReader, join


class ParallelLinear(nn.Module):
    """The base of column- and row-parallel linears: the GEMM of this rank's part, with its bias.

    ``slices`` are the parts of the full output as the checkpoint names them; ``in_features`` is the
    full input. ``has_bias`` says whether the checkpoint holds a bias; ``bias`` is what this rank
    adds, if anything.
    """

    parallel: Literal["column", "row"]

    def __init__(
        self, in_features: int, slices: tuple[OutSlice, ...], place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.slices = slices
        self.place = place
        self.group = place.group
        self.has_bias = bias
        self.weight: LinearWeight | None = None
        self.bias: torch.Tensor | None = None

    def local(self, x_TI: torch.Tensor) -> torch.Tensor:
        """This rank's GEMM plus the bias it adds: [T, I] -> [T, O]. No collective."""
        return self.loaded_weight()(x_TI, self.bias)

    def loaded_weight(self) -> LinearWeight:
        assert self.weight is not None, f"{self.slices[0].name} was never loaded"
        return self.weight

    def pack(self) -> None:
        """Lay the weight out as this device's GEMM reads it fastest; frees the plain copy.

        Once, after load.
        """
        self.loaded_weight().pack()

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.place.dtype)

    def _keep(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.weight = LinearWeight(weight_OI.to(self.place.device))
        self.bias = None if bias_O is None else bias_O.to(self.place.device)


class ColumnParallelLinear(ParallelLinear):
    """A linear whose output features are dealt to the ranks, slice by slice.

    Its output stays local.

    ``local_rows[i]`` are the rows of slice i's full output that this rank holds; the output is the
    slices' local parts side by side, ``local_sizes`` wide each.
    """

    parallel = "column"

    def __init__(
        self,
        in_features: int,
        slices: tuple[OutSlice, ...],
        place: Placement,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, slices, place, bias=bias)
        rank, world_size = place.group.rank, place.group.world_size
        self.local_rows = tuple(part.rows(rank, world_size) for part in slices)
        self.local_sizes = tuple(len(rows) for rows in self.local_rows)

    def load(self, reader: WeightReader, parent: str) -> None:
        weight_OI = self._empty(sum(self.local_sizes), self.in_features)
        bias_O = self._empty(sum(self.local_sizes)) if self.has_bias else None
        first = 0
        for part, rows in zip(self.slices, self.local_rows, strict=True):
            name, here = join(parent, part.name), slice(first, first + len(rows))
            shape = (part.out_features, self.in_features)
            reader.read_rows(f"{name}.weight", shape, rows, weight_OI[here])
            if bias_O is not None:
                reader.read_rows(f"{name}.bias", shape[:1], rows, bias_O[here])
            first = here.stop
        self._keep(weight_OI, bias_O)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.local(x_TI)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several linears of one input as one GEMM (gate and up), each slice dealt by itself."""

    def __init__(
        self,
        in_features: int,
        outputs: dict[str, int],
        place: Placement,
        *,
        bias: bool = False,
    ) -> None:
        slices = tuple(
            OutSlice(name=n, out_features=size, units=size) for n, size in outputs.items()
        )
        _refuse_few_units(slices, place)
        super().__init__(in_features, slices, place, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one GEMM, dealt by heads.

    With fewer key/value heads than ranks, neighbouring ranks hold copies of one head.
    """

    def __init__(
        self,
        in_features: int,
        place: Placement,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
    ) -> None:
        q = OutSlice(name="q_proj", out_features=num_heads * head_dim, units=num_heads)
        k, v = (
            OutSlice(name=name, out_features=num_kv_heads * head_dim, units=num_kv_heads)
            for name in ("k_proj", "v_proj")
        )
        _refuse_few_units((q,), place)
        super().__init__(in_features, (q, k, v), place, bias=bias)
        self.num_local_heads = self.local_sizes[0] // head_dim
        self.num_local_kv_heads = self.local_sizes[1] // head_dim


class RowParallelLinear(ParallelLinear):
    """A linear whose input features are dealt to the ranks; its output is summed over the group.

    ``in_units`` equal blocks of the input (attention heads, or single features) are dealt. The bias
    is added on rank 0 alone, before the sum.
    """

    parallel = "row"

    def __init__(
        self,
        in_features: int,
        name: str,
        out_features: int,
        place: Placement,
        *,
        in_units: int | None = None,
        bias: bool = False,
    ) -> None:
        part = OutSlice(name=name, out_features=out_features, units=1)
        super().__init__(in_features, (part,), place, bias=bias)
        rank, world_size = place.group.rank, place.group.world_size
        units = in_features if in_units is None else in_units
        refuse_few(name, units, world_size)
        self.local_columns = shard_range(in_features, units, rank, world_size, what=name)

    def load(self, reader: WeightReader, parent: str) -> None:
        part = self.slices[0]
        name = join(parent, part.name)
        weight_OI = self._empty(part.out_features, len(self.local_columns))
        shape = (part.out_features, self.in_features)
        reader.read_columns(f"{name}.weight", shape, self.local_columns, weight_OI)
        bias_O = None
        if self.has_bias:
            bias_O = self._empty(part.out_features)
            reader.read_rows(f"{name}.bias", shape[:1], range(part.out_features), bias_O)
        self._keep(weight_OI, bias_O if self.group.rank == 0 else None)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], the sum on every rank. Collective on ``group``: one all_reduce."""
        return self.group.all_reduce(self.local(x_TI))


def _refuse_few_units(slices: tuple[OutSlice, ...], place: Placement) -> None:
    for part in slices:
        refuse_few(part.name, part.units, place.group.world_size)


def refuse_few(name: str, units: int, world_size: int) -> None:
    """Blocks that feed a sum over the group must not be replicated: they would be counted twice."""
    if units < world_size:
        raise ConfigError(
            f"{name}: {units} blocks cannot be dealt to {world_size} ranks: "
            f"lower --tensor-parallel-size to at most {units}"
        )
