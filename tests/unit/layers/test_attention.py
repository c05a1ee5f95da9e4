"""Pins attention over paged KV against a float64 brute force, whatever rows share the step: decode
and prefill, any order, pages, window and grouping; and that no never-written slot is ever read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.attention.attention import (
    Attention,
    AttentionPlan,
    AttentionRow,
    ForwardContext,
    KernelPlan,
    KVCache,
    build_attention_plan,
)
from mstar_tp.layers.attention.paged_plan import PagedPlanner
from mstar_tp.layers.attention.torch_plan import PartKey


@pytest.fixture(autouse=True, params=["kernels", "torch", "operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on our CPU kernels, on torch alone as where they cannot be compiled, and on
    the operators that stand for kernels of another device.
    """
    if request.param == "operators":
        monkeypatch.setattr(sys.modules[__name__], "plan_step", plan_for_operators)
    elif request.param == "torch":
        monkeypatch.setattr(
            "mstar_tp.layers.attention.attention.cpu_kernels", lambda device, dtype: None
        )
    elif cpu_kernels(torch.device("cpu"), torch.float32) is None:
        pytest.skip("no C++ compiler")


CPU = torch.device("cpu")
SCALE = 0.3
NUM_PAGES = 160
# For values of size one. Inputs are rounded beforehand, so what differs is the inner rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Shape:
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def attention(self) -> Attention:
        sizes = (self.heads, self.kv_heads, self.head_dim)
        return Attention(0, *sizes, SCALE, self.window, self.softcap)

    def cache(self) -> KVCache:
        """Pages as bad as memory can be: a slot that is read before it is written spreads NaN."""
        sizes = (NUM_PAGES, self.page_size, self.kv_heads, self.head_dim)
        cache = KVCache.allocate(*sizes, self.dtype, CPU)
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
        return cache


class Request:
    """One request: all its queries, keys and values, and the pages it lies in."""

    def __init__(self, shape: Shape, length: int, pages: Sequence[int], seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        kv = (length, shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.pages = list(pages)
        self.q = torch.randn(length, shape.heads, shape.head_dim, generator=g).to(shape.dtype)
        self.k, self.v = (torch.randn(kv, generator=g).to(shape.dtype) for _ in range(2))

    def store(self, cache: KVCache, end: int) -> None:
        """Put the first ``end`` tokens where an earlier step would have, by hand."""
        for i in range(end):
            page, offset = self.pages[i // self.shape.page_size], i % self.shape.page_size
            cache.k[page, offset], cache.v[page, offset] = self.k[i], self.v[i]

    def wanted(self, first: int, end: int) -> torch.Tensor:
        """Float64 attention of queries ``first`` to ``end``, one by one: [N, H, D]."""
        return torch.stack([self._one(i) for i in range(first, end)])

    def _one(self, i: int) -> torch.Tensor:
        shape = self.shape
        low = 0 if shape.window is None else max(0, i + 1 - shape.window)
        out = []
        for head in range(shape.heads):
            k, v = (x[low : i + 1, head // shape.group].double() for x in (self.k, self.v))
            scores = k @ self.q[i, head].double() * SCALE
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            out.append(scores.softmax(0) @ v)
        return torch.stack(out)


def plan_step(shape: Shape, rows: Sequence[AttentionRow]) -> AttentionPlan | KernelPlan:
    return build_attention_plan(rows, shape.page_size, CPU)


def plan_for_operators(shape: Shape, rows: Sequence[AttentionRow]) -> KernelPlan:
    planner = PagedPlanner(shape.attention().shape, shape.dtype, shape.page_size, CPU)
    return planner.plan(rows)


def run_step(
    shape: Shape, cache: KVCache, share: Sequence[tuple[Request, int, int]]
) -> list[torch.Tensor]:
    """One step over (sequence, first token, end); each row's output [N, H, D]."""
    rows = [AttentionRow(end - first, first, s.pages) for s, first, end in share]
    plan = plan_step(shape, rows)
    q, k, v = (
        torch.cat([getattr(s, name)[first:end] for s, first, end in share]).flatten(1)
        for name in "qkv"
    )
    # As a fused projection hands them over: views of one tensor.
    widths = [q.shape[1], k.shape[1], v.shape[1]]
    q, k, v = torch.split_with_sizes(torch.cat((q, k, v), -1), widths, -1)
    out = shape.attention()(q, k, v, ForwardContext(plan, [cache]))
    assert out.shape == q.shape and out.dtype == shape.dtype
    out = out.reshape(-1, shape.heads, shape.head_dim)
    return list(out.split([end - first for _, first, end in share]))


def deal_pages(shape: Shape, lengths: Sequence[int], seed: int) -> list[list[int]]:
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    dealt, at = [], 0
    for length in lengths:
        count = -(-length // shape.page_size)
        dealt.append(order[at : at + count])
        at += count
    assert at <= NUM_PAGES
    return dealt


def assert_matches_brute_force(
    shape: Shape, spans: Sequence[tuple[int, int]], seed: int = 0
) -> None:
    """One step over rows of (context, new tokens)."""
    pages = deal_pages(shape, [c + n for c, n in spans], seed)
    cache = shape.cache()
    share = []
    for i, (context, new) in enumerate(spans):
        sequence = Request(shape, context + new, pages[i], seed + 31 * i)
        sequence.store(cache, context)
        share.append((sequence, context, context + new))
    for got, (sequence, first, end) in zip(run_step(shape, cache, share), share, strict=True):
        wanted = sequence.wanted(first, end)
        bound = TOLERANCE[shape.dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([8, 16]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, None, 1, 3, 8]),
    softcap=st.sampled_from([None, None, 4.0]),
)
spans = st.tuples(st.sampled_from([0, 0, 1, 5, 17, 23]), st.sampled_from([1, 1, 1, 2, 6]))


@settings(max_examples=60, deadline=None)
@given(shape=shapes, rows=st.lists(spans, min_size=1, max_size=5), seed=st.integers(0, 999))
def test_any_rows_in_any_order_match_the_brute_force(
    shape: Shape, rows: list[tuple[int, int]], seed: int
) -> None:
    assert_matches_brute_force(shape, rows, seed)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_every_dtype_matches_the_brute_force(dtype: torch.dtype, window: int | None) -> None:
    shape = Shape(2, 7, 64, 16, window, dtype=dtype)
    assert_matches_brute_force(shape, [(20, 1), (33, 1), (0, 1), (0, 9), (18, 9), (18, 5)])


def test_rows_of_very_different_lengths_run_apart_and_match() -> None:
    shape = Shape(1, 2, 8, 16)
    lengths = [(700, 1), (3, 1), (290, 1), (640, 1), (30, 1)]
    assert_matches_brute_force(shape, lengths)
    rows = [AttentionRow(n, c, range(NUM_PAGES)) for c, n in lengths]
    plan = build_attention_plan(rows, shape.page_size, CPU)
    parts = plan.parts(PartKey(None, 2, 1, torch.float32, True, False))
    assert sorted(part.num_keys for part in parts) == [31, 291, 701]


@settings(max_examples=25, deadline=None)
@given(shape=shapes, cuts=st.sets(st.integers(1, 19), max_size=4))
def test_a_prompt_in_chunks_is_the_prompt_at_once(shape: Shape, cuts: set[int]) -> None:
    length = 20
    (pages,) = deal_pages(shape, [length], 7)
    sequence = Request(shape, length, pages, 3)
    whole = run_step(shape, shape.cache(), [(sequence, 0, length)])[0]
    cache, edges = shape.cache(), [0, *sorted(cuts), length]
    chunks = [run_step(shape, cache, [(sequence, first, end)])[0] for first, end in pairwise(edges)]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decoding_token_by_token_is_prefilling(dtype: torch.dtype) -> None:
    shape = Shape(2, 2, 16, 4, window=5, dtype=dtype)
    (pages,) = deal_pages(shape, [12], 1)
    sequence = Request(shape, 12, pages, 2)
    whole = run_step(shape, shape.cache(), [(sequence, 0, 12)])[0]
    cache = shape.cache()
    steps = [run_step(shape, cache, [(sequence, i, i + 1)])[0] for i in range(12)]
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(steps), whole, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_result_is_its_own_whatever_its_neighbours_hold(dtype: torch.dtype) -> None:
    """A neighbour full of infinities and NaN changes no bit: rows meet only in shapes."""
    shape = Shape(2, 2, 16, 4, dtype=dtype)
    pages = deal_pages(shape, [30, 30, 30], 5)
    results = []
    for poison in (False, True):
        cache, share = shape.cache(), []
        for i, (context, new) in enumerate(((20, 1), (9, 1), (12, 8))):
            sequence = Request(shape, context + new, pages[i], i)
            if poison and i == 1:
                sequence.k.fill_(float("nan"))
                sequence.v.fill_(float("inf"))
            sequence.store(cache, context)
            share.append((sequence, context, context + new))
        results.append(run_step(shape, cache, share))
    for i in (0, 2):
        assert torch.equal(results[0][i], results[1][i])
        assert results[0][i].isfinite().all()


def test_a_step_writes_its_tokens_slots_and_no_other() -> None:
    shape = Shape(1, 1, 8, 4)
    (pages,) = deal_pages(shape, [10], 9)
    sequence, cache = Request(shape, 10, pages, 1), shape.cache()
    sequence.store(cache, 6)
    run_step(shape, cache, [(sequence, 6, 10)])
    wanted = shape.cache()
    sequence.store(wanted, 10)
    assert torch.equal(cache.k.nan_to_num(-1.0), wanted.k.nan_to_num(-1.0))
    assert torch.equal(cache.v.nan_to_num(-1.0), wanted.v.nan_to_num(-1.0))


def test_a_layout_is_computed_once_a_step_and_shared_by_its_layers() -> None:
    plan = build_attention_plan([AttentionRow(1, 5, [0]), AttentionRow(1, 9, [1])], 16, CPU)
    key = PartKey(None, 2, 1, torch.float32, True, False)
    assert plan.parts(key) is plan.parts(PartKey(*key))
    assert plan.parts(key._replace(window=4)) is not plan.parts(key)


def test_a_row_without_pages_for_its_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="a row of 9 tokens has 2 pages of 4"):
        build_attention_plan([AttentionRow(1, 8, [3, 5])], 4, CPU)
