"""Made-up rows for the operators of ``lora.end_ops``, with what float64 says of them.

What lies past a slot's rank and past its saved rows is NaN, so a kernel that reads it is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.lora.device import vocab_ops
from mstar_tp.lora.device.tiles import TiledRows
from support.delta_cases import TOLERANCE


class VocabCase:
    """An embedding, a head and a norm of ``len(ranks)`` slots on a device, filled from a seed.

    ``saved``: how many rows each slot puts in the place of a base weight's. The rank holds the ids
    from ``first_id``, ``ids`` of them.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int,
        ranks: Sequence[int],
        saved: Sequence[int],
        ids: int = 50,
        first_id: int = 50,
        hidden: int = 40,
        max_rank: int = 24,
    ) -> None:
        slots, most = len(ranks), max(*saved, 1)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        a, b = random(slots, ids, max_rank), random(slots, max_rank, hidden)
        rows = random(slots, most, hidden)
        chosen = torch.full((slots, most), -(1 << 40))
        for slot, (rank, count) in enumerate(zip(ranks, saved, strict=True)):
            a[slot, :, rank:] = torch.nan
            b[slot, rank:] = torch.nan
            rows[slot, count:] = torch.nan
            chosen[slot, :count] = torch.randperm(ids, generator=generator)[:count].sort().values
        self.first_id, self.ids, self.hidden = first_id, ids, hidden
        self.dtype, self.device = dtype, device
        self.a, self.b, self.rows = (t.to(device, dtype) for t in (a, b, rows))
        self.chosen = chosen.to(device)
        self.ranks = torch.tensor(ranks, device=device)
        self.counts = torch.tensor(saved, dtype=torch.int32, device=device)
        self.bias = random(slots, hidden).to(device, dtype)
        self.replaced = torch.tensor([slot % 2 for slot in range(slots)], device=device).int()
        self._random = random
        self._generator = generator

    def _some(self, *shape: int) -> torch.Tensor:
        return self._random(*shape).to(self.device, self.dtype)

    def check(self, slots: Sequence[int], rows: TiledRows) -> None:
        """Compare every operator with float64 for tokens of these ``slots`` (0: base).

        Raises:
            AssertionError: an adapter row is off, or another row has other bits.
        """
        self.check_embed(slots, rows)
        self.check_head_rows(slots, rows)
        self.check_bias(slots, rows)
        for unit_offset in (False, True):
            self.check_norm(slots, rows, unit_offset)

    def check_embed(self, slots: Sequence[int], rows: TiledRows) -> None:
        tokens = torch.randint(
            self.first_id - 5,
            self.first_id + self.ids + 5,
            (len(slots),),
            generator=self._generator,
        )
        y = self._some(len(slots), self.hidden)
        wanted, touched = y.cpu().double(), set[int]()
        for row, slot in enumerate(slots):
            here = int(tokens[row]) - self.first_id
            if not slot or not 0 <= here < self.ids:
                continue
            touched.add(row)
            rank, count = int(self.ranks[slot - 1]), int(self.counts[slot - 1])
            a, b = self.a[slot - 1, here, :rank], self.b[slot - 1, :rank]
            wanted[row] += a.cpu().double() @ b.cpu().double()
            saved = self.chosen[slot - 1, :count].tolist()
            if here in saved:
                wanted[row] = self.rows[slot - 1, saved.index(here)].cpu().double()
        got = y.clone()
        torch.ops.mstar_lora.embed(
            got,
            tokens.to(self.device),
            self.a,
            self.b,
            *(self.chosen, self.rows, self.counts),
            *(rows.order_R, rows.tiles_N3, self.ranks),
            self.first_id,
            rows.block_rows,
        )
        self._compare("embed", got, wanted, y, touched)

    def check_head_rows(self, slots: Sequence[int], rows: TiledRows) -> None:
        x, y = self._some(len(slots), self.hidden), self._some(len(slots), self.ids)
        wanted, got = y.cpu().double(), y.clone()
        for row, slot in enumerate(slots):
            count = int(self.counts[slot - 1]) if slot else 0
            saved = self.rows[slot - 1, :count].cpu().double()
            wanted[row, self.chosen[slot - 1, :count].cpu()] = saved @ x[row].cpu().double()
        torch.ops.mstar_lora.head_rows(
            got,
            x,
            *(self.chosen, self.rows, self.counts),
            *(rows.order_R, rows.tiles_N3, rows.block_rows),
        )
        self._compare("head_rows", got, wanted, y, {row for row, slot in enumerate(slots) if slot})

    def check_bias(self, slots: Sequence[int], rows: TiledRows) -> None:
        y = self._some(len(slots), self.hidden)
        wanted, got = y.cpu().double(), y.clone()
        for row, slot in enumerate(slots):
            if slot:
                wanted[row] += self.bias[slot - 1].cpu().double()
        vocab_ops.add_biases(got, self.bias, rows)
        self._compare("add_bias", got, wanted, y, {row for row, slot in enumerate(slots) if slot})

    def check_norm(self, slots: Sequence[int], rows: TiledRows, unit_offset: bool) -> None:
        """Check the norm of rows of three heads that lie in wider ones."""
        x = self._some(len(slots), 4, self.hidden)[:, :3]
        y = self._some(len(slots), 3, self.hidden)
        wanted, got, eps = y.cpu().double(), y.clone(), 1e-6
        touched = {row for row, slot in enumerate(slots) if slot and self.replaced[slot - 1]}
        for row in touched:
            wide = x[row].cpu().double()
            wide /= (wide.square().mean(-1, keepdim=True) + eps).sqrt()
            weight = self.bias[slots[row] - 1].cpu().double()
            wanted[row] = wide * (1 + weight if unit_offset else weight)
        torch.ops.mstar_lora.norm(
            got,
            x,
            self.bias,
            self.replaced,
            *(rows.order_R, rows.tiles_N3),
            eps,
            unit_offset,
            rows.block_rows,
        )
        self._compare("norm", got, wanted, y, touched)

    def _compare(
        self,
        what: str,
        got: torch.Tensor,
        wanted: torch.Tensor,
        before: torch.Tensor,
        touched: set[int],
    ) -> None:
        others = [row for row in range(len(got)) if row not in touched]
        assert torch.equal(got[others], before[others]), f"{what} changed another row"
        tolerance = TOLERANCE[self.dtype] * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(
            got.cpu().double(), wanted, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}"
        )
