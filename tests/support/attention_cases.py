"""Made-up rows over paged keys and values for the operators of ``attention_ops``.

Here are the answers of float64 on them, and the checks that Triton's interpreter and a CUDA device
share.

Every slot that no query of a step may see is NaN, so a kernel that reads one is found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mstar_tp.layers.attention.attention import AttentionRow, AttentionShape, KernelPlan
from mstar_tp.layers.attention.attention_ops import reference_attend
from mstar_tp.layers.attention.paged_plan import PagedPlan, PagedPlanner

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""The tolerance, of the largest element: a rounding of weights and one of the result."""


class AttentionKind(NamedTuple):
    """The shape that the kernels' code depends on; ``group``: query heads a key head."""

    kv_heads: int
    group: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    page_size: int = 16


KINDS = (
    AttentionKind(8, 4, 128),
    AttentionKind(2, 1, 64, window=1),
    AttentionKind(1, 7, 80, window=33, softcap=5.0),
    AttentionKind(1, 2, 256, softcap=30.0),
    AttentionKind(1, 24, 96, window=150, page_size=24),
    AttentionKind(3, 1, 16, page_size=1),
)
"""Every choice of the launches.

They are heads that share keys or not, more of them than one block takes, head sizes with masks and
without, a window, a cap, both, and pages of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Layers of one shape, and a cache of ``num_pages`` pages."""

    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device
    page_size: int = 16
    num_pages: int = 160
    seed: int = 0

    @classmethod
    def of(
        cls, kind: AttentionKind, dtype: torch.dtype, device: torch.device, *, seed: int = 0
    ) -> AttentionCase:
        """Layers of ``kind``, with pages for 6400 tokens."""
        heads, dim = kind.kv_heads * kind.group, kind.head_dim
        return cls(
            shape=AttentionShape(heads, kind.kv_heads, dim, dim**-0.5, kind.window, kind.softcap),
            dtype=dtype,
            device=device,
            page_size=kind.page_size,
            num_pages=6400 // kind.page_size,
            seed=seed,
        )

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
        """Random queries, keys and values of the rows; those past their own tokens are NaN.

        ``num_tokens`` counts the padding too.
        """
        return AttentionStep(self, rows, num_tokens)


class AttentionStep:
    """One step's inputs.

    ``k``, ``v`` and ``q`` are views of one tensor, as projections make them; ``cache`` holds the
    keys and values that earlier steps have written.
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
        """The operators' answer: [T, X], padding included."""
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


def check_rows(case: AttentionCase, spans: Sequence[tuple[int, int]], padding: int = 0) -> None:
    """Check that rows of (context, new tokens) equal float64, in both modes.

    They are in tables of their own, and with ``padding`` rows and tokens more in those of a
    captured bucket.
    """
    rows = case.rows(spans)
    tokens = sum(row.num_tokens for row in rows)
    pages = max(len(row.pages) for row in rows)
    sizes = len(rows) + padding, tokens + padding, pages + padding
    for invariant in (False, True):
        planner = case.planner(invariant=invariant)
        case.step(rows).check(planner.plan(rows))
        if padding:
            decodes = tokens == len(rows)
            buffer = (
                planner.decode_buffer(sizes[0], sizes[2])
                if decodes
                else planner.mixed_buffer(*sizes)
            )
            case.step(rows, num_tokens=sizes[1]).check(buffer.fill(rows))


def check_company(case: AttentionCase, spans: Sequence[tuple[int, int]]) -> None:
    """Check that the invariant mode gives a row the same bits alone, among others, in a bucket."""
    rows = case.rows(spans)
    step, planner = case.step(rows), case.planner(invariant=True)
    whole = step.attend(planner.plan(rows))
    bucket = planner.decode_buffer(8, max(len(row.pages) for row in rows))
    first = 0
    for at, row in enumerate(rows):
        stop = first + row.num_tokens
        alone = case.step([row])
        alone.cache = step.cache
        alone.q, alone.k, alone.v = (x[first:stop] for x in (step.q, step.k, step.v))
        assert torch.equal(alone.attend(planner.plan([row])), whole[first:stop]), at
        if row.num_tokens == 1:
            alone.q, alone.k, alone.v = (
                x.expand(8, -1).contiguous() for x in (alone.q, alone.k, alone.v)
            )
            assert torch.equal(alone.attend(bucket.fill([row]))[:1], whole[first:stop]), at
        first = stop


def check_replays(case: AttentionCase, *, decodes: bool) -> None:
    """A bucket captured once on the CUDA device replays other rows: the bits of launches."""
    tokens = 16 if decodes else 256
    planner = case.planner()
    buffer = planner.decode_buffer(16, 60) if decodes else planner.mixed_buffer(16, tokens, 60)
    mixes = [
        ((0, 1),),
        tuple((40 * row, 1) for row in range(16)),
        ((900, 1), (3, 1), (64, 1)),
    ]
    if not decodes:
        mixes.append(((500, 1), (70, 100), (0, 130)))
    step = case.step((), num_tokens=tokens)
    step.attend(buffer.fill(()))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attend(buffer.plan)
    for spans in mixes:
        rows = case.rows(spans)
        other = case.step(rows, num_tokens=tokens)
        wanted = other.check(buffer.fill(rows))
        for ours, theirs in (
            (step.q, other.q),
            (step.k, other.k),
            (step.v, other.v),
            (step.cache, other.cache),
        ):
            ours.copy_(theirs)
        graph.replay()
        assert torch.equal(out, wanted), "a replayed attention differs"
