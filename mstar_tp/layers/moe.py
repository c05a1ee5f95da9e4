"""Routed experts, each split over the tensor-parallel group, and how a step's tokens reach them.

A step's (token, expert) pairs become *rows*, an expert's side by side, so that an expert is one
GEMM or one part of a kernel call; on CUDA they stay in the tokens' order, and tables sort them.
What a row comes to depends on no other row: few tokens take a kernel whose sums have one order,
many take GEMMs of one fixed number of rows, filled up with zeros. So a token is the same whichever
experts its neighbours go to. Step thread.

Legend: T tokens of the step, D hidden size, E experts, K experts a token, I inner size as this rank
holds it, O outputs of a GEMM, P pairs
of a token and an expert, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from mstar_tp.distributed.shard import OutSlice, shard_range
from mstar_tp.kernels.cpu import CpuKernels, cpu_kernels
from mstar_tp.layers.linear import refuse_few
from mstar_tp.layers.weights import MatrixPart, Placement, WeightReader, join
from mstar_tp.lora.device.expert_deltas import StepPairs
from mstar_tp.lora.device.expert_ops import GroupedPairs, are_taken, grouped

TILE = 32
"""Rows of one GEMM."""
FEW_ROWS = 16
"""Up to so many rows an expert, on average, the kernel is faster than GEMMs."""


class ExpertNames(NamedTuple):
    """An expert's linears as the checkpoint names them."""

    gate: str
    up: str
    down: str


class Routing(NamedTuple):
    """The experts of tokens: ``experts`` int64 and their ``weights`` float32, [T, K] each."""

    experts: torch.Tensor
    weights: torch.Tensor


def route(logits_TE: torch.Tensor, num_per_token: int, normalise: bool) -> Routing:
    """The most likely experts of each token; ``normalise``: their weights sum to one."""
    probabilities_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
    weights_TK, experts_TK = probabilities_TE.topk(num_per_token, dim=-1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(experts_TK, weights_TK)


@dataclass(slots=True, eq=False)
class ExpertRows:
    """A step's rows at one layer, an expert's side by side.

    ``places`` [T, K] is each pair's row, of ``num_rows``. Either for the kernel: expert e's rows
    are ``indptr[e]`` to ``indptr[e + 1]``. Or for GEMMs of ``TILE`` rows each, the last of an
    expert filled up: ``tiles[i]`` is the expert of tile i. All int64. Or for the operators, in
    ``grouped``: a row is a pair, in the tokens' order, and ``places`` are not needed.
    """

    routing: Routing
    places: torch.Tensor | None
    num_rows: int
    indptr: torch.Tensor | None = None
    tiles: tuple[int, ...] = ()
    grouped: GroupedPairs | None = None
    pairs: StepPairs | None = None
    """The rows that adapters change: set by the first of the layer's linears that asks."""

    @classmethod
    def of(cls, routing: Routing, num_experts: int, kernels: CpuKernels | None) -> ExpertRows:
        """Choose kernel or GEMMs by the number of tokens alone.

        So no token's path depends on where others go.
        """
        pairs = routing.experts.flatten()
        order = pairs.argsort(stable=True)
        counts_E = pairs.bincount(minlength=num_experts)
        ends_E = counts_E.cumsum(0)
        rows = torch.arange(len(pairs), device=pairs.device)
        places = torch.empty_like(order)
        if kernels is not None and len(pairs) <= FEW_ROWS * num_experts:
            places[order] = rows
            indptr = torch.cat([ends_E.new_zeros(1), ends_E])
            return cls(routing, places.view_as(routing.experts), len(pairs), indptr)
        tiles_E = (counts_E + TILE - 1) // TILE
        # A row's place: its expert's first tile, and its number among the expert's rows.
        shift_E = (tiles_E.cumsum(0) - tiles_E) * TILE - (ends_E - counts_E)
        places[order] = rows + shift_E[pairs[order]]
        experts = torch.arange(num_experts, device=pairs.device)
        tiles = tuple(experts.repeat_interleave(tiles_E).tolist())
        places = places.view_as(routing.experts)
        return cls(routing, places, TILE * len(tiles), tiles=tiles)

    @classmethod
    def on_operators(cls, routing: Routing, num_experts: int) -> ExpertRows:
        """Rows that the operators take, laid out on the device."""
        pairs = grouped(routing.experts, num_experts)
        return cls(routing, None, routing.experts.numel(), grouped=pairs)

    def spread(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Each token in each of its rows; zeros in rows that nobody has: [T, D] -> [R, D]."""
        assert self.places is not None, "the operators take tokens as they are"
        x_RD = x_TD.new_zeros(self.num_rows, x_TD.shape[1])
        x_PD = x_TD.repeat_interleave(self.places.shape[1], dim=0)
        return x_RD.index_copy_(0, self.places.flatten(), x_PD)

    def gather(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Each token's rows, weighted and summed in float32: [R, D] -> [T, D]."""
        assert self.places is not None, "the operators take pairs as they are"
        y_TKD = y_RD[self.places]
        return (y_TKD * self.routing.weights[:, :, None]).sum(dim=1).to(y_RD.dtype)


class ExpertLinear(nn.Module):
    """One expert's gate and up, or its down, as adapters see it: sizes, names and split.

    The weight lies with the other experts', and ``RoutedExperts`` runs it.
    """

    def __init__(
        self, in_features: int, slices: tuple[OutSlice, ...], parallel: Literal["column", "row"]
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.slices = slices
        self.parallel = parallel

    def adapted(self, y_RO: torch.Tensor, x_RI: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """The output of this linear of *all* experts of the layer under the step's adapters.

        It is ``y`` itself, for there are none.
        """
        return y_RO


class Expert(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int, names: ExpertNames) -> None:
        super().__init__()
        inner = (
            OutSlice(name=name, out_features=inner_size, units=inner_size)
            for name in (names.gate, names.up)
        )
        self.gate_up_proj = ExpertLinear(hidden_size, tuple(inner), "column")
        down = OutSlice(name=names.down, out_features=hidden_size, units=1)
        self.down_proj = ExpertLinear(inner_size, (down,), "row")


class RoutedExperts(nn.ModuleList):
    """All experts of one layer: down(act(gate(x)) * up(x)).

    Each expert's inner features are dealt to the ranks.

    The checkpoint names an expert's linears ``experts.N.{gate}.weight``, or has all of them stacked
    in ``experts.gate_up_proj`` [E, 2I, D] and ``experts.down_proj`` [E, D, I].
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        names: ExpertNames,
        activate: Callable[[torch.Tensor], torch.Tensor],
        place: Placement,
    ) -> None:
        super().__init__(Expert(hidden_size, inner_size, names) for _ in range(num_experts))
        rank, world_size = place.group.rank, place.group.world_size
        refuse_few(f"experts.{names.gate}", inner_size, world_size)
        self.inner = shard_range(inner_size, inner_size, rank, world_size, what="experts")
        """The inner features that this rank holds."""
        self.hidden_size = hidden_size
        self.inner_size = inner_size
        self.num_experts = num_experts
        self.names = names
        self.place = place
        self.group = place.group
        self._activate = activate
        self.gate_up_EOD: torch.Tensor | None = None
        self.down_EDI: torch.Tensor | None = None

    def load(self, reader: WeightReader, parent: str) -> None:
        """Read this rank's part of every expert, in whichever of the two layouts there is.

        Raises:
            CheckpointError: a key is absent or misshapen.
        """
        local, hidden = len(self.inner), self.hidden_size
        dtype, device = self.place.dtype, self.place.device
        gate_up = torch.empty(self.num_experts, 2 * local, hidden, dtype=dtype)
        down = torch.empty(self.num_experts, hidden, local, dtype=dtype)
        path = join(parent, "experts")
        stacked = [reader.has(f"{path}.{name}") for name in ("gate_up_proj", "down_proj")]
        if any(stacked):
            self._load_stacked(reader, path, gate_up, down)
        else:
            self._load_each(reader, path, gate_up, down)
        self.gate_up_EOD, self.down_EDI = gate_up.to(device), down.to(device)

    def _load_each(
        self, reader: WeightReader, path: str, gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        local, whole = len(self.inner), (self.inner_size, self.hidden_size)
        for expert in range(self.num_experts):
            stem = f"{path}.{expert}"
            halves = torch.split(gate_up[expert], local)
            for name, half in zip((self.names.gate, self.names.up), halves, strict=True):
                reader.read_rows(f"{stem}.{name}.weight", whole, self.inner, half)
            key = f"{stem}.{self.names.down}.weight"
            reader.read_columns(key, whole[::-1], self.inner, down[expert])

    def _load_stacked(
        self, reader: WeightReader, path: str, gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        size, hidden, local = self.inner_size, self.hidden_size, len(self.inner)
        for expert in range(self.num_experts):
            for first, half in zip((0, size), torch.split(gate_up[expert], local), strict=True):
                rows = range(first + self.inner.start, first + self.inner.stop)
                reader.read_matrix(
                    f"{path}.gate_up_proj",
                    (self.num_experts, 2 * size, hidden),
                    expert,
                    MatrixPart(rows, range(hidden)),
                    half,
                )
            reader.read_matrix(
                f"{path}.down_proj",
                (self.num_experts, hidden, size),
                expert,
                MatrixPart(range(hidden), self.inner),
                down[expert],
            )

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[T, D] -> [T, D], the sum on every rank. Collective: one all_reduce."""
        if are_taken(x_TD.device):
            return self.group.all_reduce(self._on_operators(x_TD, routing))
        kernels = cpu_kernels(x_TD.device, x_TD.dtype)
        rows = ExpertRows.of(routing, self.num_experts, kernels)
        any_expert = self[0]
        assert isinstance(any_expert, Expert)
        x_RD = rows.spread(x_TD)
        y_RO = _multiply(x_RD, self.gate_up_EOD, rows, kernels)
        x_RI = self._activate(any_expert.gate_up_proj.adapted(y_RO, x_RD, rows))
        y_RD = _multiply(x_RI, self.down_EDI, rows, kernels)
        return self.group.all_reduce(rows.gather(any_expert.down_proj.adapted(y_RD, x_RI, rows)))

    def _on_operators(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """This rank's part: [T, D] -> [T, D]. Nothing here waits for the device."""
        rows = ExpertRows.on_operators(routing, self.num_experts)
        any_expert, pairs = self[0], rows.grouped
        assert isinstance(any_expert, Expert) and pairs is not None
        tables = pairs.order, pairs.tiles
        choices, block_rows = routing.experts.shape[1], pairs.block_rows
        multiply = torch.ops.mstar_moe.linear
        y_PO = multiply(x_TD, self.gate_up_EOD, *tables, choices, block_rows)
        x_PI = self._activate(any_expert.gate_up_proj.adapted(y_PO, x_TD, rows))
        y_PD = multiply(x_PI, self.down_EDI, *tables, 1, block_rows)
        adapted_PD = any_expert.down_proj.adapted(y_PD, x_PI, rows)
        out_TD: torch.Tensor = torch.ops.mstar_moe.combine(adapted_PD, routing.weights)
        return out_TD


def _multiply(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor | None,
    rows: ExpertRows,
    kernels: CpuKernels | None,
) -> torch.Tensor:
    """Each row times its expert's weight; for this rank's part of it."""
    assert weight_EOI is not None, "the experts were never loaded"
    if rows.indptr is not None:
        assert kernels is not None, "the rows were laid out for a kernel"
        return kernels.expert_linear(x_RI, weight_EOI, rows.indptr)
    y_RO = x_RI.new_empty(rows.num_rows, weight_EOI.shape[1])
    tiles = zip(torch.split(x_RI, TILE), torch.split(y_RO, TILE), rows.tiles, strict=True)
    for x_tile, y_tile, expert in tiles:
        torch.mm(x_tile, weight_EOI[expert].t(), out=y_tile)
    return y_RO
