"""Made-up adapter rows for the operators of ``lora.ops``, with what float64 says of them.

What lies past a slot's rank is NaN, so a kernel that reads padding is found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mstar_tp.lora.device import ops
from mstar_tp.lora.device.tiles import TileBuffer, TiledRows, TileSizes, column_blocks

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The tolerance as a part of the largest element: a rounding of h and one of y."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """One target's storage: ``ranks`` are the slots' own."""

    in_features: int
    out_sizes: tuple[int, ...]
    max_rank: int
    ranks: tuple[int, ...]
    dtype: torch.dtype


class DeltaCase:
    """Storage of one target on a device, filled from a seed."""

    def __init__(self, shape: DeltaShape, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots, slices = len(shape.ranks), len(shape.out_sizes)
        a = torch.randn(slots, slices * shape.max_rank, shape.in_features, generator=generator)
        b = torch.randn(slots, shape.max_rank, sum(shape.out_sizes), generator=generator)
        a /= shape.in_features**0.5
        for slot, rank in enumerate(shape.ranks):
            b[slot, rank:] = torch.nan
            for part in range(slices):
                a[slot, part * shape.max_rank + rank : (part + 1) * shape.max_rank] = torch.nan
        self.shape = shape
        self.device = device
        self.a = a.to(device, shape.dtype)
        self.b = b.to(device, shape.dtype)
        self.ranks = torch.tensor(shape.ranks, device=device)
        self.blocks = column_blocks(shape.out_sizes, device)
        self._generator = generator

    def rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random x [T, I] and y [T, O]."""
        sizes = self.shape.in_features, sum(self.shape.out_sizes)
        x, y = (torch.randn(num_tokens, size, generator=self._generator) for size in sizes)
        return x.to(self.device, self.shape.dtype), y.to(self.device, self.shape.dtype)

    def apply(self, y: torch.Tensor, x: torch.Tensor, rows: TiledRows) -> torch.Tensor:
        """``y + delta(x)`` by the operator. A new tensor."""
        out = y.clone()
        torch.ops.mstar_lora.apply(
            out,
            x,
            self.a,
            self.b,
            rows.order_R,
            rows.tiles_N3,
            self.ranks,
            self.blocks,
            rows.block_rows,
            rows.invariant,
        )
        return out

    def check(self, slots: Sequence[int], rows: TiledRows) -> None:
        """Compare the operator with float64 for tokens of these ``slots`` (0: base).

        Raises:
            AssertionError: an adapter row is off, or a base row has other bits.
        """
        x, y = self.rows(len(slots))
        got = self.apply(y, x, rows).cpu()
        again = self.apply(y, x, rows).cpu()
        if y.is_cuda or ops.interprets() or y.dtype == torch.float32:
            assert torch.equal(again, got), "two runs differ"
        else:
            # torch's narrow GEMMs on CPUs round by where their operands lie in memory.
            atol = TOLERANCE[y.dtype] * got.abs().max().item()
            assert torch.allclose(again, got, rtol=0, atol=atol), "two runs differ"
        base = [row for row, slot in enumerate(slots) if not slot]
        assert torch.equal(got[base], y.cpu()[base]), "a base row changed"
        wanted = ops.reference_apply(
            y.cpu(),
            x.cpu(),
            self.a.cpu(),
            self.b.cpu(),
            rows.order_R.cpu(),
            rows.tiles_N3.cpu(),
            self.ranks.cpu(),
            self.blocks.cpu(),
        )
        scale = max(1.0, float(wanted.abs().max()))
        tolerance = TOLERANCE[self.shape.dtype] * scale
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


def mixed_slots(num_tokens: int, num_slots: int, seed: int) -> list[int]:
    """A slot for each token, in runs of any length; some slots may have none. 0: base."""
    chooser, slots = random.Random(seed), list[int]()
    while len(slots) < num_tokens:
        length = chooser.choice([1, 1, 1, 2, 17, 64, 65])
        slots += [chooser.randint(0, num_slots)] * length
    return slots[:num_tokens]


def tiled(
    slots: Sequence[int], device: torch.device, *, invariant: bool = False
) -> TiledRows | None:
    """The tables for tokens of these slots, as an eager step has them; None without any."""
    rows_of = rows_by_slot(slots)
    if not rows_of:
        return None
    sizes = TileSizes.of(sum(map(len, rows_of.values())), len(rows_of), invariant=invariant)
    return TileBuffer(sizes, device, invariant=invariant).fill(rows_of)


def rows_by_slot(slots: Sequence[int]) -> dict[int, list[int]]:
    """Each slot's tokens; base tokens are left out."""
    rows_of: dict[int, list[int]] = {}
    for token, slot in enumerate(slots):
        if slot:
            rows_of.setdefault(slot, []).append(token)
    return rows_of
