"""Adapters take turns: what a hot one does to the others, in steps and tokens, on the real
scheduler, admission, CPU cache and pool.

* However much a hot adapter asks for, a cold one's request waits for the rows that run and for one
  request of each adapter that waits before it, not for the hot one's backlog.
* Adapters that always wait are given tokens by their weights.
* A row whose adapter runs as many as it may holds nothing and keeps nobody waiting.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from support.admission_simulation import AdmissionSim

from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.adapter_limits import AdapterLimits
from mstar_tp.wire.values import AdapterKey

KEYS = [AdapterKey(f"a{number:02}", 1) for number in range(21)]
SLOTS, ROWS = 4, 8


@contextmanager
def serving(
    *,
    fair: bool = True,
    limits: Mapping[AdapterKey | None, AdapterLimits] | None = None,
    rows: int = ROWS,
    **others: int,
) -> Iterator[AdmissionSim]:
    spec = tiny_spec(slots=SLOTS, cpu_capacity=len(KEYS), layers=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_adapter(folder, q_pairs(spec)))
        sim = AdmissionSim(
            spec, read_steps=1, max_num_seqs=rows, fair=fair, limits=limits, **others
        )
        try:
            sim.serve([(key, path) for key in KEYS])
            for _ in range(2):
                sim.step()
            yield sim
        finally:
            sim.close()


def run_out(sim: AdmissionSim) -> int:
    """Until every request has ended; the most steps that one ran."""
    for _ in range(20_000):
        if not len(sim.requests):
            break
        sim.step()
    assert all(visit.left is not None for visit in sim.visits.values()), "a request got nowhere"
    assert not sim.scheduler.num_waiting and not sim.scheduler.num_running
    return max((v.left or 0) - (v.joined or 0) for v in sim.visits.values())


def p95(waits: Sequence[int]) -> int:
    return sorted(waits)[-(-95 * len(waits) // 100) - 1]


def hot_and_cold(*, fair: bool) -> tuple[list[int], int]:
    """Waits of 60 requests on 20 cold adapters beside one that always has 150 waiting, and L."""
    rng = random.Random(7)
    hot, *cold = KEYS
    whose: dict[int, AdapterKey] = {}
    with serving(fair=fair) as sim:

        def arrive(key: AdapterKey) -> None:
            whose[len(whose)] = key
            sim.arrive(len(whose) - 1, key, prompt=4, output=rng.randint(4, 12))

        for _ in range(150):
            arrive(hot)
        when = sorted(rng.choices(range(400), k=60))
        for step in range(400):
            live = sum(whose[request.rid] == hot for request in sim.requests)
            for _ in range(158 - live):
                arrive(hot)
            for _ in range(when.count(step)):
                arrive(rng.choice(cold))
            sim.step()
        longest = run_out(sim)
        return [sim.visits[r].wait for r, key in whose.items() if key != hot], longest


def test_a_hot_adapter_does_not_make_cold_ones_wait_for_its_backlog() -> None:
    waits, longest = hot_and_cold(fair=True)
    # Before it: at most the request whose turn was lowest, and other cold ones of the same moment.
    assert p95(waits) <= longest
    assert max(waits) <= 2 * longest
    by_arrival, longest = hot_and_cold(fair=False)
    assert p95(by_arrival) > 8 * longest, "by arrival they wait for 150 others"


def test_adapters_that_always_wait_are_given_tokens_by_their_weights() -> None:
    limits = {KEYS[0]: AdapterLimits(weight=3.0), KEYS[1]: AdapterLimits(weight=0.5)}
    rng = random.Random(3)
    with serving(limits=limits) as sim:
        for rid in range(900):
            # None is the base model; KEYS[0]'s answers are long, KEYS[1]'s prompts are.
            key = (KEYS[0], KEYS[1], None)[rid % 3]
            prompt, most = {KEYS[0]: (2, 16), KEYS[1]: (12, 4), None: (6, 8)}[key]
            sim.arrive(rid, key, prompt=prompt, output=rng.randint(1, most))
        while all(
            any(v.key == key and v.joined is None for v in sim.visits.values())
            for key in (KEYS[0], KEYS[1], None)
        ):
            sim.step()
        told = sim.scheduler.flow_shares()
        assert [share.share for share in told] == [1 / 4.5, 3 / 4.5, 0.5 / 4.5]
        assert sum(share.running for share in told) == sim.scheduler.num_running
        assert sum(share.waiting for share in told) == sim.scheduler.num_waiting
        assert told[1].limits.weight == 3.0
        fair_queue = {share.adapter: share.tokens for share in told}
        unit = fair_queue[None]
        assert unit > 600
        # Off by what the rows of one moment may be given before they count: 8 of up to 18 tokens.
        assert abs(fair_queue[KEYS[0].name] / 3.0 - unit) <= 8 * 18
        assert abs(fair_queue[KEYS[1].name] / 0.5 - unit) <= 8 * 18 / 0.5
        assert abs(fair_queue[KEYS[0].name] / unit - 3.0) < 0.5
        assert abs(fair_queue[KEYS[1].name] / unit - 0.5) < 0.1
        run_out(sim)


Work = list[tuple[int, int, int, int]]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2)),
        min_size=1,
        max_size=40,
    ),
    st.lists(st.sampled_from([0.25, 1.0, 5.0]), min_size=6, max_size=6),
    st.integers(1, 5),
    st.integers(6, 40),
)
def test_nobody_passes_a_request_that_has_its_turn_but_those_whose_turn_is_lower(
    work: Work, weights: list[float], rows: int, max_tokens: int
) -> None:
    """And with its turn it waits as the bound for arrival order says, over those before it."""
    limits = {
        key: AdapterLimits(weight=weight)
        for key, weight in zip((None, *KEYS[:5]), weights, strict=True)
    }
    with serving(limits=limits, rows=rows, max_num_batched_tokens=max(max_tokens, rows)) as sim:
        watch = _Watch(sim)
        for rid, (adapter, prompt, output, pause) in enumerate(work):
            sim.arrive(rid, (None, *KEYS[:5])[adapter], prompt=prompt, output=output)
            for _ in range(pause):
                watch.step()
        while len(sim.requests):
            watch.step()
        longest = run_out(sim)
        for rid, (_, when) in watch.start_tags.items():
            wait = (sim.visits[rid].joined or 0) - when
            assert wait <= 2 * longest * (watch.before[rid] + 1)


class _Watch:
    """Who joins before whom."""

    def __init__(self, sim: AdmissionSim) -> None:
        self._sim = sim
        self.start_tags: dict[int, tuple[int, int]] = {}
        """Request -> its turn, and the step it has had it since."""
        self.before: Counter[int] = Counter()
        """Request -> how many joined while it had its turn."""
        self._take = sim.scheduler._fair_queue.take
        sim.scheduler._fair_queue.take = self._taken  # type: ignore[method-assign]

    def _taken(self, rid: int) -> None:
        """It has all it asked for."""
        self._note()
        self._take(rid)

    def _note(self) -> None:
        for request in self._sim.requests:
            if request.start_tag is not None:
                self.start_tags.setdefault(request.rid, (request.start_tag, self._sim.now))
                assert self.start_tags[request.rid][0] == request.start_tag, "a turn is for good"

    def step(self) -> None:
        sim = self._sim
        self._note()
        had = [rid for rid in self.start_tags if sim.visits[rid].joined is None]
        joined = sim.step().joined
        for other in set(had) - set(joined):
            self.before[other] += len(joined)
            for rid in joined:
                if (self.start_tags[rid][0], rid) > (self.start_tags[other][0], other):
                    assert sim.visits[rid].key is None, "it passed, and asks for a slot"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1)),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
    st.integers(1, 3),
)
def test_a_row_over_its_adapters_limit_holds_nothing_and_keeps_nobody_waiting(
    work: Work, fair: bool, most: int
) -> None:
    limited = KEYS[0]
    with serving(fair=fair, limits={limited: AdapterLimits(max_rows=most)}) as sim:
        for rid, (adapter, prompt, output, pause) in enumerate(work):
            sim.arrive(
                rid, (limited, KEYS[1], KEYS[2], None)[adapter], prompt=prompt, output=output
            )
            for _ in range(1 + pause):
                sim.step()
                check_limit(sim, limited, most)
        while len(sim.requests):
            sim.step()
            check_limit(sim, limited, most)
        run_out(sim)


def check_limit(sim: AdmissionSim, limited: AdapterKey, most: int) -> None:
    running = Counter(v.key for v in sim.visits.values() if v.joined is not None and v.left is None)
    assert running[limited] <= most
    waiting = [
        request.rid
        for request in sim.requests
        if (visit := sim.visits[request.rid]).joined is None and visit.entered is not None
    ]
    claims = sim.leader.tables.claims
    assert not set(waiting) & set(claims), "who waits holds nothing"
    # Rows, slots and pages are there for all others: only the limit may keep one waiting.
    if sum(running.values()) < ROWS:
        for rid in waiting:
            visit = sim.visits[rid]
            if visit.key != limited:
                assert (visit.entered or 0) >= sim.now - 1, "it waits for a row that may not join"


def test_a_limited_adapter_uses_its_limit_whatever_waits_before_it() -> None:
    limits: dict[AdapterKey | None, AdapterLimits] = {KEYS[0]: AdapterLimits(max_rows=2)}
    with serving(fair=False, limits=limits) as sim:
        for rid in range(6):
            sim.arrive(rid, KEYS[0], output=4)
        sim.arrive(6, KEYS[1], output=4)
        sim.step()
        joined = {rid for rid, visit in sim.visits.items() if visit.joined is not None}
        assert joined == {0, 1, 6}
        run_out(sim)
        order = sorted(range(6), key=lambda rid: sim.visits[rid].joined or 0)
        assert order == list(range(6))
        assert [sim.visits[rid].joined for rid in (2, 4)] == [
            sim.visits[rid].left for rid in (0, 2)
        ]
