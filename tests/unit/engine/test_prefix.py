"""What pages are named by, and what the leader makes of pages that are kept: nothing is shared that
anything but tokens could make differ, a cached prompt still computes its last token, and requests
get in whenever they would without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.kv.prefix import PrefixNames, root_of
from mstar_tp.engine.scheduling.requests import NO_TOKEN, RequestTable
from mstar_tp.engine.scheduling.scheduler import Scheduler
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.values import AdapterKey, ImageInput, SamplingParams

PAGE = 4
TEXT = tuple(range(5, 22))
"""Four pages and a token."""


class Rank:
    """A rank's requests and pages, without adapters' slots or a model: every sample is token 7."""

    def __init__(self, num_pages: int = 32, *, cached: bool = True, model: str = "m") -> None:
        self.requests = RequestTable()
        self.digests: dict[AdapterKey, str] = {}
        self.table = PageTable(num_pages, PAGE)
        self.names = PrefixNames(self.requests, PAGE, model, self.digests.get)
        self.kv = KvPool(
            self.table,
            lambda rid: self.requests[rid].expected,
            names=self.names if cached else None,
        )
        self.scheduler = Scheduler(
            self.requests, self.kv, (), max_num_seqs=4, max_num_batched_tokens=24
        )
        self.tp_seq = -1

    def open(self, rid: int, prompt: Sequence[int] = TEXT, **more: Any) -> None:
        params = SamplingParams(max_tokens=more.pop("output", 2), **more.pop("params", {}))
        self.requests.add(NewRequest(rid=rid, prompt=tuple(prompt), params=params, **more))
        self.kv.ingest_request(rid)
        self.scheduler.enqueue(rid)

    def step(self) -> StepBatch:
        """Plan a step and run it; its rows."""
        plan = self.scheduler.plan()
        self.tp_seq += 1
        step = self.requests.build_step(self.tp_seq, plan.rows, cached=plan.cached)
        assert self.kv.admit(step).refused is None
        self.kv.commit(step)
        sampling = [row.rid for row in step.rows if row.samples]
        for rid in self.requests.commit(step, [7] * len(sampling)):
            self.remove(rid)
        return step

    def remove(self, rid: int) -> None:
        self.scheduler.remove(rid)
        self.kv.remove_request(rid, spoilt=self.requests[rid].dead is not None)
        self.requests.remove(rid)

    def run(self, rid: int, **more: Any) -> int:
        """A request to its end; how many of its tokens were not computed."""
        self.open(rid, **more)
        before = self.kv.sharing.tokens_cached
        while rid in self.requests:
            self.step()
        return self.kv.sharing.tokens_cached - before


def test_pages_are_shared_by_equal_tokens_on_equal_weights_only() -> None:
    rank = Rank()
    one, again, other = AdapterKey("a", 1), AdapterKey("a", 2), AdapterKey("b", 1)
    rank.digests |= {one: "x", again: "y", other: "x"}
    assert rank.run(0) == 0
    assert rank.run(1) == 16
    assert rank.run(2, adapter=one) == 0, "not the base's"
    assert rank.run(3, adapter=one) == 16
    assert rank.run(4, adapter=again) == 0, "other weights under the same name"
    assert rank.run(5, adapter=other) == 16, "the same weights under another name"
    assert rank.run(6, adapter=AdapterKey("unread", 1)) == 0
    assert rank.run(7, adapter=AdapterKey("unread", 1)) == 0, "nobody knows what made its pages"
    assert rank.run(8, prompt=(9, *TEXT[1:])) == 0
    assert rank.run(9, prompt=(*TEXT[:6], 99, *TEXT[7:])) == 4


def test_another_model_and_other_borders_between_parts_are_another_root() -> None:
    roots = [
        root_of("base", "m"), root_of("base", "n"), root_of("adapter", "m", "d"),
        root_of("adapter", "md", ""), root_of("adapterm", "d"), root_of("base", "m", ""),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_a_prompt_that_is_cached_whole_computes_its_last_page_from_its_last_token_on() -> None:
    rank = Rank()
    rank.run(0, prompt=TEXT[:16])
    rank.open(1, prompt=TEXT[:16])
    (row,) = rank.step().rows
    assert (row.start, row.num_tokens, row.samples) == (12, 4, True)
    rank.run(2, prompt=TEXT[:13])
    rank.open(3, prompt=TEXT[:13])
    assert [(r.start, r.num_tokens) for r in rank.step().rows if r.rid == 3] == [(12, 1)]


def test_a_chat_goes_on_from_what_was_generated() -> None:
    rank = Rank()
    rank.run(0, output=9)
    # 17 tokens and 8 of 9 that were sampled have keys and values: six pages and a token.
    assert rank.run(1, prompt=(*TEXT, *[7] * 9, 30, 31)) == 24
    assert rank.run(2, prompt=(*TEXT, *[7] * 6, 8, 30)) == 20


def test_what_needs_the_prompts_logits_or_stands_behind_an_image_is_computed() -> None:
    rank = Rank()
    rank.run(0)
    assert rank.run(1, params={"prompt_logprobs": 1}) == 0
    image = ImageInput(start=6, num_tokens=3, pixels=b"a")
    assert rank.run(2, images=(image,)) == 4
    assert rank.run(3, prompt=(1, *TEXT), images=(image,)) == 0
    assert rank.run(4, prompt=(1, *TEXT), images=(image,)) == 4


def test_two_that_begin_in_one_step_both_compute_and_one_names_its_pages() -> None:
    rank = Rank(num_pages=64)
    rank.scheduler._max_tokens = 64
    rank.open(0, output=9)
    rank.open(1, output=9)
    assert [row.start for row in rank.step().rows] == [0, 0]
    assert rank.table.num_used == 10 and rank.table.num_named == 4
    rank.open(2)
    row = rank.step().rows[-1]
    assert (row.rid, row.start) == (2, 16)
    assert list(rank.kv.table.held(2))[:4] == list(rank.kv.table.held(0))[:4]


def test_a_chunk_that_has_run_is_shared_while_its_request_prefills_on() -> None:
    rank = Rank()
    long = tuple(range(60))
    rank.open(0, prompt=long)
    rank.step()  # 24 tokens of it
    rank.open(1, prompt=(*long[:40], 1))
    rank.scheduler._max_tokens = 64
    rows = {row.rid: row for row in rank.step().rows}
    assert (rows[0].start, rows[1].start) == (24, 24)


def test_a_request_that_failed_leaves_nothing() -> None:
    rank = Rank()
    rank.open(0)
    rank.step()
    assert rank.table.num_named == 4
    step = rank.requests.build_step(9, [(0, 1)])
    rank.requests.commit(step, [NO_TOKEN])
    rank.remove(0)
    assert rank.table.num_named == 0
    assert rank.run(1) == 0


def test_a_preempted_request_finds_its_own_pages() -> None:
    rank = Rank(num_pages=10)
    rank.open(0, prompt=range(100, 113), output=20)
    rank.open(1, prompt=range(200, 205), output=20)
    while not rank.scheduler.preemptions:
        rank.step()
    before = rank.kv.sharing.tokens_cached
    while 1 in rank.requests:
        rank.step()
    assert rank.kv.sharing.tokens_cached - before > 0


def test_a_rank_that_lacks_what_the_leader_found_stops() -> None:
    rank = Rank()
    rank.run(0)
    rank.open(1)
    row = StepRow(rid=1, start=20, num_tokens=1, samples=False, cached=20)
    with pytest.raises(LockstepError, match="step 5: request 1 begins behind 20 tokens"):
        rank.kv.admit(StepBatch(tp_seq=5, rows=(row,)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 2), st.integers(1, 9), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    st.integers(8, 16),
)
def test_requests_get_in_whenever_they_would_without_a_cache(
    work: list[tuple[int, int, int, bool]], num_pages: int
) -> None:
    """Whatever is kept, a request that waits fits as soon as its pages are free, or leased by
    others; all end, and nothing is held then.
    """
    rank = Rank(num_pages)
    for rid, (length, stem, output, steps) in enumerate(work):
        rank.open(rid, prompt=[stem] * length, output=output)
        if steps:
            rank.step()
        for request in rank.requests:
            held = rank.table.held(request.rid)
            wanted = rank.table.pages_for(len(request.tokens) + 1)
            if not held and wanted <= rank.kv.unreserved and rank.kv.ask(request.rid) is not None:
                assert rank.kv.reserve(request.rid) is not None
                rank.kv.unreserve(request.rid)
    for _ in range(600):
        if not len(rank.requests):
            break
        assert rank.step().rows, "requests wait and nothing runs"
    assert not len(rank.requests)
    assert rank.table.num_used == 0
    assert rank.kv.unreserved == num_pages
