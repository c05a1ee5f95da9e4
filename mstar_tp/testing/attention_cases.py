"""Made-up rows over paged keys and values for the operators of ``attention_ops``, with what float64
says of them.

Every slot that no query of a step may see is NaN, so a kernel that reads one is found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mstar_tp.layers.attention import AttentionRow, AttentionShape, KernelPlan
from mstar_tp.layers.attention_ops import reference_attend
from mstar_tp.layers.paged_plan import PagedPlan, PagedPlanner

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest element: a rounding of the weights and one of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Layers of one shape, and a cache of ``num_pages`` pages."""

    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device
    page_size: int = 16
    num_pages: int = 160
    seed: int = 0

    def planner(self, *, invariant: bool = False) -> PagedPlanner:
        return PagedPlanner(
            self.shape, self.dtype, self.page_size, self.device, invariant=invariant
        )

    def rows(self, spans: Sequence[tuple[int, int]]) -> list[AttentionRow]:
        """Rows of (context, new tokens), on pages in no order."""
        free = list(range(self.num_pages))
        random.Random(self.seed).shuffle(free)
        rows = []
        for context, new in spans:
            used = -(-(context + new) // self.page_size)
            rows.append(AttentionRow(new, context, [free.pop() for _ in range(used)]))
        return rows

    def step(self, rows: Sequence[AttentionRow], num_tokens: int | None = None) -> AttentionStep:
        """Random queries, keys and values of the rows; those of ``num_tokens`` past their own,
        padding, are NaN.
        """
        return AttentionStep(self, rows, num_tokens)


class AttentionStep:
    """One step's inputs. ``k``, ``v`` and ``q`` are views of one tensor, as projections make them;
    ``cache`` holds what earlier steps have written.
    """

    def __init__(
        self, case: AttentionCase, rows: Sequence[AttentionRow], num_tokens: int | None
    ) -> None:
        shape, generator = case.shape, torch.Generator().manual_seed(case.seed)
        real = sum(row.num_tokens for row in rows)
        widths = [heads * shape.head_dim for heads in (shape.num_heads, *2 * [shape.num_kv_heads])]
        fused = torch.full((num_tokens or real, sum(widths)), torch.nan)
        fused[:real] = torch.randn(real, sum(widths), generator=generator)
        sizes = (case.num_pages, case.page_size, shape.num_kv_heads, shape.head_dim)
        cache = torch.full((2, *sizes), torch.nan)
        for row in rows:
            first = 0 if shape.window is None else max(0, row.context + 1 - shape.window)
            for at in range(first, row.context):
                place = row.pages[at // case.page_size], at % case.page_size
                cache[:, place[0], place[1]] = torch.randn(2, *sizes[2:], generator=generator)
        self.case = case
        self.num_tokens = real
        fused = fused.to(case.device, case.dtype)
        self.q, self.k, self.v = torch.split_with_sizes(fused, widths, -1)
        self.cache = cache.to(case.device, case.dtype)

    def attend(self, plan: KernelPlan) -> torch.Tensor:
        """What the operators say: [T, X], padding included."""
        return plan.attend(self.case.shape, self.q, self.k, self.v, *self.cache)

    def check(self, plan: PagedPlan) -> torch.Tensor:
        """Compare the operators with float64, twice; what they say.

        Raises:
            AssertionError: a token is off, another run has other bits, padding is not zero, or
                another slot than the tokens' own was written.
        """
        before = self.cache.clone()
        got = self.attend(plan)
        assert torch.equal(self.attend(plan), got), "two runs differ"
        assert (got[self.num_tokens :] == 0).all(), "padding gives no zeros"
        slots = plan.slots_T[: self.num_tokens].long()
        assert (plan.slots_T[self.num_tokens :] == -1).all()
        for index, new in enumerate((self.k, self.v)):
            before[index].flatten(0, 1)[slots] = new[: self.num_tokens].reshape(
                -1, *before.shape[-2:]
            )
        assert torch.equal(self.cache.nan_to_num(-7), before.nan_to_num(-7)), "wrong slots written"
        shape, cache = self.case.shape, self.cache.cpu()
        wanted = reference_attend(
            self.q.cpu(),
            cache[0],
            cache[1],
            plan.pages_BW.cpu(),
            plan.lengths_B.cpu(),
            plan.starts.cpu(),
            shape.window or 0,
            shape.scale,
            shape.softcap or 0.0,
        )
        scale = max(1.0, float(wanted.abs().max()))
        tolerance = TOLERANCE[self.case.dtype] * scale
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=tolerance)
        return got
