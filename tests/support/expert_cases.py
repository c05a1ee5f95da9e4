"""Made-up routed experts for the operators of ``lora.expert_ops``, with float64 beside them."""

from __future__ import annotations

import random

import torch

from mstar_tp.lora.device.expert_ops import GroupedPairs, grouped, tiled_pairs
from mstar_tp.lora.device.expert_weights import ExpertWeights
from mstar_tp.lora.device.tiles import column_blocks
from support.delta_cases import TOLERANCE


class ExpertStore:
    """Slots of one linear of all experts, as ``ExpertWeights`` reads them, filled from a seed.

    Entries past a slot's rank are NaN.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        experts: int,
        ranks: tuple[int, ...],
        in_features: int,
        out_sizes: tuple[int, ...],
        seed: int = 0,
    ) -> None:
        slots, slices, self.max_rank = len(ranks), len(out_sizes), max(1, *ranks)
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(experts, slots, slices * self.max_rank, in_features, generator=generator)
        b = torch.randn(experts, slots, self.max_rank, sum(out_sizes), generator=generator)
        bias = torch.randn(experts, slots, sum(out_sizes), generator=generator)
        a /= in_features**0.5
        for slot, rank in enumerate(ranks):
            b[:, slot, rank:] = torch.nan
            for part in range(slices):
                a[:, slot, part * self.max_rank + rank : (part + 1) * self.max_rank] = torch.nan
        self.a_NLMI, self.b_NLKO, self.bias_NLO = (t.to(device, dtype) for t in (a, b, bias))
        self.ranks_of = list(ranks)
        self.ranks_L = torch.tensor(ranks, device=device)
        self.ranks_NL = self.ranks_L.repeat(experts, 1)
        ends = torch.tensor(out_sizes).cumsum(0)
        self.slice_ends = ends
        self.slices = [
            slice(end - size, end) for end, size in zip(ends.tolist(), out_sizes, strict=True)
        ]
        self.column_blocks: torch.Tensor | None = column_blocks(out_sizes, device)

    def delta(self, expert: int, slot: int, x: torch.Tensor) -> torch.Tensor:
        """The delta of one row, bias included, in float64 on the CPU."""
        rank = self.ranks_of[slot - 1]
        out = self.bias_NLO[expert, slot - 1].cpu().double()
        for part, columns in enumerate(self.slices):
            first = part * self.max_rank
            a = self.a_NLMI[expert, slot - 1, first : first + rank].cpu().double()
            b = self.b_NLKO[expert, slot - 1, :rank, columns].cpu().double()
            out[columns] += (a @ x.cpu().double()) @ b
        return out


def check_experts(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    choices: int,
    ranks: tuple[int, ...],
    hidden: int = 48,
    inner: int = 40,
    only: int | None = None,
    seed: int = 0,
) -> None:
    """Compare grouping, GEMMs, deltas and sums of one layer with float64.

    ``only``: of the experts, those that tokens go to.

    Raises:
        AssertionError: a row is off, or one without an adapter was changed.
    """
    generator = torch.Generator().manual_seed(seed)
    chooser = random.Random(seed)
    likely = torch.randn(tokens, only or experts, generator=generator)
    chosen, weights = likely.topk(choices).indices, torch.rand(tokens, choices, generator=generator)
    slots = torch.tensor([chooser.randint(0, len(ranks)) for _ in range(tokens)])
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    weight = torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    weight = weight.to(device, dtype)
    down = torch.randn(experts, hidden, inner, generator=generator).to(device, dtype) / inner**0.5

    pairs = grouped(chosen.to(device), experts)
    _check_order(pairs, chosen)
    tables = pairs.order, pairs.tiles
    y = torch.ops.mstar_moe.linear(x, weight, *tables, choices, pairs.block_rows)
    flat = chosen.flatten().tolist()
    wanted = torch.stack(
        [weight[e].cpu().double() @ x[at // choices].cpu().double() for at, e in enumerate(flat)]
    )
    _compare("gate and up", y, wanted, dtype)

    store = ExpertStore(
        device,
        dtype,
        experts=experts,
        ranks=ranks,
        in_features=hidden,
        out_sizes=(inner, inner),
        seed=seed,
    )
    before = y.clone()
    _add(store, y, x, pairs, slots, choices)
    _compare_deltas(store, y, before, x[torch.arange(len(flat)) // choices], flat, slots, choices)

    inside = y[:, :inner].contiguous()
    out = torch.ops.mstar_moe.linear(inside, down, *tables, 1, pairs.block_rows)
    wanted = torch.stack(
        [down[e].cpu().double() @ inside[at].cpu().double() for at, e in enumerate(flat)]
    )
    _compare("down", out, wanted, dtype)
    store = ExpertStore(
        device, dtype, experts=experts, ranks=ranks, in_features=inner, out_sizes=(hidden,)
    )
    before = out.clone()
    _add(store, out, inside, pairs, slots, choices)
    _compare_deltas(store, out, before, inside, flat, slots, choices)

    summed = torch.ops.mstar_moe.combine(out, weights.to(device))
    wide = out.cpu().double().view(tokens, choices, hidden) * weights[:, :, None].double()
    _compare("sum", summed, wide.sum(1), dtype)


def _add(
    store: ExpertStore,
    y: torch.Tensor,
    x: torch.Tensor,
    pairs: GroupedPairs,
    slots: torch.Tensor,
    choices: int,
) -> None:
    adapted = ExpertWeights(store, None)
    tiled = tiled_pairs(slots.to(y.device), choices, pairs, len(store.ranks_of))
    adapted.add(y, x, tiled)
    adapted.add_bias(y, tiled)


def _check_order(pairs: GroupedPairs, chosen: torch.Tensor) -> None:
    """Stable, and each expert's tiles cover its pairs once."""
    wanted = chosen.flatten().argsort(stable=True)
    assert torch.equal(pairs.order.cpu().long(), wanted), "pairs are in another order"
    experts, covered = chosen.flatten()[wanted].tolist(), list[int]()
    for expert, first, stop in pairs.tiles.tolist():
        assert all(e == expert for e in experts[first:stop]), "a tile has another expert's pairs"
        assert stop - first <= pairs.block_rows
        covered += range(first, stop)
    assert sorted(covered) == list(range(len(experts))), "tiles leave pairs out"


def _compare_deltas(
    store: ExpertStore,
    got: torch.Tensor,
    before: torch.Tensor,
    x: torch.Tensor,
    experts: list[int],
    slots: torch.Tensor,
    choices: int,
) -> None:
    wanted = before.cpu().double()
    for at, expert in enumerate(experts):
        slot = int(slots[at // choices])
        if slot:
            wanted[at] += store.delta(expert, slot, x[at])
        else:
            assert torch.equal(got[at], before[at]), "a base row changed"
    _compare("deltas", got, wanted, got.dtype)


def _compare(what: str, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(
        got.cpu().double(), wanted, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )
