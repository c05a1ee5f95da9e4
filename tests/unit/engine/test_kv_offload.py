"""Promise: a preempted request whose KV fits into host memory goes on from it, whatever others do
with its pages meanwhile; host pages are never given twice and never lost; ranks decide alike.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.copy_stress import StressDevice
from support.fake_queues import FakeQueues
from support.page_stress import (
    NUM_HOST_PAGES,
    NUM_PAGES,
    PAGE_SIZE,
    small_cache,
    wrong_pages,
)

from mstar_tp.common.errors import LockstepError
from mstar_tp.config import EngineConfig
from mstar_tp.engine.kv_sizes import kv_page_bytes, num_host_pages
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.kv.host_copies import HostCopies, runs
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload, NoCopies
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.lora.device.device_copies import OneQueue
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import ModelConfig

CPU = torch.device("cpu")


class OffloadMachine(RuleBasedStateMachine):
    """The pool of a rank with real copies, beside a twin without, against the simplest model: of
    each request, the tokens its KV stands for and whether that is here, in host memory or nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = small_cache(CPU)
        self.pool = self._pool(KvOffload(HostPages(NUM_HOST_PAGES), self._copies()))
        self.twin = self._pool(KvOffload(HostPages(NUM_HOST_PAGES), NoCopies()))
        self.written: dict[int, list[float]] = {}
        """What was written for each token that need not be computed again."""
        self.here: set[int] = set()
        self.host: dict[int, int] = {}
        self.fresh = count(1)
        self.rids = count()
        self.steps = count()
        self.recomputed = 0

    def _copies(self) -> HostCopies:
        return HostCopies(self.kv, NUM_HOST_PAGES, OneQueue())

    def _pool(self, offload: KvOffload) -> KvPool:
        table = PageTable(NUM_PAGES, PAGE_SIZE)
        return KvPool(table, lambda rid: len(self.written[rid]), offload)

    def _pages(self, rid: int) -> int:
        return -(-len(self.written[rid]) // PAGE_SIZE)

    def _used(self) -> int:
        return sum(self._pages(rid) for rid in self.here)

    @rule(data=st.data(), new=st.booleans(), num_tokens=st.integers(1, 5), refused=st.booleans())
    def step(self, data: st.DataObject, new: bool, num_tokens: int, refused: bool) -> None:
        """Run one request: a new one, one that has its pages, or one that was preempted."""
        rid = next(self.rids) if new or not self.written else None
        if rid is None:
            rid = data.draw(st.sampled_from(sorted(self.written)))
        tokens = self.written.setdefault(rid, [])
        before = self._pages(rid) if rid in self.here else 0
        needs = -(-(len(tokens) + num_tokens) // PAGE_SIZE) - before
        row = StepRow(rid=rid, start=len(tokens), num_tokens=num_tokens, samples=True)
        rows = [row]
        if refused:  # by a request that needs more than there is
            rows.append(StepRow(rid=-1, start=0, num_tokens=100, samples=True))
        step = StepBatch(tp_seq=next(self.steps), rows=tuple(rows))
        fits = not refused and needs <= NUM_PAGES - self._used()
        for pool in (self.pool, self.twin):
            outcome = pool.admit(step)
            assert (outcome.refused is None) == fits
            if not fits:
                pool.rollback_admit(step)
        if not fits:
            return
        self.here.add(rid)
        self.host.pop(rid, None)
        self._write(rid, num_tokens)

    def _write(self, rid: int, num_tokens: int) -> None:
        tokens = self.written[rid]
        for _ in range(num_tokens):
            at, value = len(tokens), float(next(self.fresh))
            page = self.pool.table.held(rid)[at // PAGE_SIZE]
            for layer, cache in enumerate(self.kv):
                cache.k[page, at % PAGE_SIZE] = value + layer / 4
                cache.v[page, at % PAGE_SIZE] = -value - layer / 4
            tokens.append(value)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.here)))
        pages, tokens = self._pages(rid), len(self.written[rid])
        fits = pages <= NUM_HOST_PAGES - sum(self.host.values())
        assert self.pool.can_offload(rid, tokens) == fits
        if not fits:
            with pytest.raises(LockstepError, match=f"request {rid}: its KV of {tokens} tokens"):
                self.twin.preempt(rid, tokens, offload=True)
        for pool in (self.pool, self.twin):
            pool.preempt(rid, tokens, offload=fits)
        self.here.remove(rid)
        if fits:
            self.host[rid] = pages
        else:
            self.recomputed += tokens
            del self.written[rid]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.written)))
        for pool in (self.pool, self.twin):
            pool.remove_request(rid)
        del self.written[rid]
        self.here.discard(rid)
        self.host.pop(rid, None)

    @invariant()
    def every_page_that_a_request_holds_has_what_was_written(self) -> None:
        for rid in self.here:
            pages = list(self.pool.table.held(rid))
            for layer, cache in enumerate(self.kv):
                found = cache.k[pages].flatten(0, 1)[: len(self.written[rid])]
                wanted = torch.tensor(self.written[rid]) + layer / 4
                assert torch.equal(found, wanted[:, None, None].expand_as(found))
                assert torch.equal(cache.v[pages].flatten(0, 1)[: len(wanted)], -found)

    @invariant()
    def host_pages_have_one_owner_and_are_counted(self) -> None:
        host = self.pool.kept.host
        held = {rid: list(host.held(rid)) for rid in host.rids}
        assert {rid: len(pages) for rid, pages in held.items()} == self.host
        places = [page for pages in held.values() for page in pages]
        assert len(set(places)) == len(places) == host.num_used
        assert self.pool.kept.recomputed_tokens == self.recomputed
        for rid in self.written:
            assert self.pool.kept.fetches(rid) == (rid in self.host)

    @invariant()
    def the_twin_is_the_same(self) -> None:
        assert self.pool.history() == self.twin.history()
        assert self.pool.table.num_free == self.twin.table.num_free == NUM_PAGES - self._used()

    def teardown(self) -> None:
        for rid in list(self.written):
            self.pool.remove_request(rid)
        assert self.pool.table.num_used == self.pool.kept.host.num_used == 0
        assert not self.pool.kept._leaving


OffloadMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestOffload = OffloadMachine.TestCase


def stress(seed: int) -> int:
    """How many rows find wrong pages, on a device whose queues get as far as ``seed`` says."""
    queues = FakeQueues(seed)
    on = StressDevice(
        device=CPU,
        queues=queues,
        backend="torch",
        launch=queues.launch,
        passes=queues.some_time_passes,
        finish=queues.finish,
    )
    return wrong_pages(on, seed)


def test_steps_find_their_pages_whatever_the_device_runs_first() -> None:
    assert sum(stress(seed) for seed in range(8)) == 0


def test_steps_must_wait_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeQueues, "steps_wait_for", lambda self, event: None)
    assert sum(stress(seed) for seed in range(8)) > 0


def test_runs_are_cut_where_numbers_do_not_follow() -> None:
    found = [(list(range(9))[at], place) for at, place in runs([4, 5, 6, 2, 8, 9])]
    assert found == [([0, 1, 2], slice(4, 7)), ([3], slice(2, 3)), ([4, 5], slice(8, 10))]
    assert list(runs([])) == []


def test_host_memory_has_as_many_pages_as_asked_for_or_as_could_be_of_use() -> None:
    model = cast(ModelConfig, SimpleNamespace(num_layers=2, head_dim=8))
    module = cast(
        CausalLM, SimpleNamespace(num_kv_heads=1, place=SimpleNamespace(dtype=torch.float32))
    )
    sizes = {"model": "m", "tensor_parallel_size": 2, "max_num_seqs": 4, "block_size": 16}
    page = 2 * 2 * 16 * 8 * 4

    def pages(num_pages: int, **more: float) -> int:
        config = EngineConfig.model_validate(sizes | more)
        return num_host_pages(config, model, module, 40, num_pages)

    assert kv_page_bytes(EngineConfig.model_validate(sizes), model, module) == page
    assert pages(11) == 11, "as much as the pages themselves"
    assert pages(12) == 0, "four requests of three pages each fit: nobody is preempted"
    assert pages(12, kv_offloading_size=2 * 7.5 * page / (1 << 30)) == 7, "of two ranks"
    assert pages(11, kv_offloading_size=0) == 0
    assert pages(10**9, max_num_seqs=10**9) == (4 << 30) // page
