"""The starvation bound, in steps, on the real scheduler, admission, CPU cache and pool.

L: the most steps from a row's joining to its remove. n: requests that arrived before one and had
not joined when it entered the queue. S: slots, or rows of a step where those are fewer.

* The oldest waiting adapter gets the next slot freed, whatever comes for the resident ones.
* Where only slots and rows are short, a request waits at most L * (n // S + 1) steps in the queue.
* Whatever is short (pages, tokens of a step, slots, rows), at most 2 * L * (n + 1).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from support.admission_simulation import AdmissionSim, Visit

from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

KEYS = [AdapterKey(name, 1) for name in "abcdef"]
SLOTS = 2


@contextmanager
def serving(*, cpu_capacity: int = 4, **limits: int) -> Iterator[AdmissionSim]:
    """Six adapters on two slots; a read takes two steps."""
    spec = tiny_spec(slots=SLOTS, cpu_capacity=cpu_capacity, layers=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_adapter(folder, q_pairs(spec)))
        sim = AdmissionSim(spec, read_steps=2, **limits)
        try:
            sim.serve([(key, path) for key in KEYS])
            yield sim
        finally:
            sim.close()


def run_out(sim: AdmissionSim) -> int:
    """Until every request has ended; L."""
    for _ in range(20_000):
        if not len(sim.requests):
            break
        sim.step()
    assert all(visit.left is not None for visit in sim.visits.values()), "a request got nowhere"
    return max(stay(visit) for visit in sim.visits.values())


def stay(visit: Visit) -> int:
    assert visit.joined is not None and visit.left is not None
    return visit.left - visit.joined


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=40, max_size=40),
    st.sampled_from([4, 6]),
    st.integers(5, 20),
)
def test_with_continuous_load_on_resident_adapters_the_oldest_waiting_one_gets_the_next_slot(
    outputs: list[int], cpu_capacity: int, when: int
) -> None:
    a, b, c = KEYS[:3]
    with serving(cpu_capacity=cpu_capacity) as sim:
        for rid, output in enumerate(outputs):
            sim.arrive(rid, c if rid == when else (a, b)[rid % 2], output=output)
            sim.step()
        run_out(sim)
        waiting = sim.visits[when]
        assert waiting.entered is not None and waiting.joined is not None
        # A slot is free once the last of its adapter's rows that ran then has left.
        freed = {a: waiting.entered, b: waiting.entered}
        for visit in sim.visits.values():
            if visit.key in freed and visit.joined is not None and visit.left is not None:
                if visit.joined < waiting.entered:
                    freed[visit.key] = max(freed[visit.key], visit.left)
        assert waiting.joined == min(freed.values())
        younger = [v for r, v in sim.visits.items() if r > when and v.joined is not None]
        assert not [v for v in younger if waiting.entered <= (v.joined or 0) < waiting.joined], (
            "nobody who asks for a slot passes it"
        )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=40
    ),
    st.sampled_from([2, 4, 6]),
    st.integers(1, 6),
)
def test_where_slots_and_rows_are_short_nobody_waits_past_the_bound(
    work: list[tuple[int, int, int]], cpu_capacity: int, max_num_seqs: int
) -> None:
    with serving(cpu_capacity=cpu_capacity, max_num_seqs=max_num_seqs) as sim:
        for rid, (adapter, output, pause) in enumerate(work):
            sim.arrive(rid, KEYS[adapter] if adapter < len(KEYS) else None, output=output)
            for _ in range(pause):
                sim.step()
        longest = run_out(sim)
        for visit in sim.visits.values():
            assert visit.wait <= longest * (visit.ahead // min(SLOTS, max_num_seqs) + 1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 12), st.integers(0, 1)),
        min_size=1,
        max_size=30,
    ),
    st.integers(8, 16),
    st.integers(4, 12),
)
def test_whatever_is_short_nobody_waits_past_the_bound(
    work: list[tuple[int, int, int, int]], num_pages: int, max_tokens: int
) -> None:
    limits = {
        "num_pages": num_pages,
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": max_tokens,
    }
    with serving(**limits) as sim:
        for rid, (adapter, prompt, output, pause) in enumerate(work):
            key = KEYS[adapter] if adapter < len(KEYS) else None
            sim.arrive(rid, key, prompt=prompt, output=output)
            for _ in range(pause):
                sim.step()
        longest = run_out(sim)
        for visit in sim.visits.values():
            assert visit.wait <= 2 * longest * (visit.ahead + 1)
        assert sim.kv.table.num_used == 0 and sim.leader.reports.debug_state().slots
