"""Memory for copies on one rank, with real reader threads: what a drop leaves behind counts until
it is gone, and the read that needs its room waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.admission_simulation import AdmissionSim

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.checkpoint import AdapterFile
from mstar_tp.lora.reading import shards
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

P, Q, R = (AdapterKey(name, 1) for name in "pqr")


class Gate:
    """Stands before one adapter's copy; ``log`` says in which order copies were begun and ended."""

    def __init__(self, patch: pytest.MonkeyPatch, key: AdapterKey) -> None:
        self.log: SimpleQueue[str] = SimpleQueue()
        self.reached, self.open = threading.Event(), threading.Event()
        read = shards.read_adapter

        def gated(spec: LoraSpec, which: AdapterKey, *rest: Any, **how: Any) -> LoadedAdapter:
            self.log.put(f"{which.name} begins")
            try:
                if which == key:
                    self.reached.set()
                    assert self.open.wait(60)
                return read(spec, which, *rest, **how)
            finally:
                self.log.put(f"{which.name} ends")

        patch.setattr(shards, "read_adapter", gated)

    def events(self, count: int) -> list[str]:
        return [self.log.get(timeout=30) for _ in range(count)]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[AdmissionSim]:
    """One slot and one place in the CPU cache."""
    spec = tiny_spec(slots=1, cpu_capacity=1)
    sim = AdmissionSim(spec)
    path = str(write_adapter(tmp_path, q_pairs(spec)))
    for key in (P, Q, R):
        causes: SimpleQueue[str | None] = SimpleQueue()
        sim.leader.loads.begin(key, path, lambda cause, *_, to=causes: to.put(cause))
        assert causes.get(timeout=30) is None
        assert sim.leader.loads.commit(key, path) is None
    yield sim
    sim.close()


def test_a_read_in_flight_for_a_dropped_hold_counts_until_it_ends(
    sim: AdmissionSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, P)
    sim.arrive(0, P)
    assert gate.reached.wait(30)
    sim.remove(0)
    sim.arrive(1, Q)
    assert sim.leader.reports.debug_state().cpu_cache == (Q,), "the order decides at once"
    gate.open.set()
    sim.wait_for_a_copy()
    assert gate.events(4) == ["p begins", "p ends", "q begins", "q ends"]
    assert sim.step().rows == [(1, 1)]
    assert sim.leader.reports.cpu_cache_state().peak == 1


def test_a_read_that_waits_for_memory_and_is_dropped_never_begins(
    sim: AdmissionSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, P)
    sim.arrive(0, P)
    assert gate.reached.wait(30)
    for rid, key in ((1, Q), (2, R)):
        sim.remove(rid - 1)
        sim.arrive(rid, key)
    gate.open.set()
    sim.wait_for_a_copy()
    assert gate.events(4) == ["p begins", "p ends", "r begins", "r ends"]


def test_storage_that_hangs_before_an_adapters_headers_are_read_keeps_no_other_out(
    sim: AdmissionSim,
) -> None:
    checker = sim.leader.store.checker
    check, hangs, end = checker.check, threading.Event(), threading.Event()

    def hanging(name: str, path: str) -> AdapterFile:
        if name == "p":
            hangs.set()
            assert end.wait(60)
        return check(name, path)

    checker.check = hanging  # type: ignore[method-assign]
    sim.arrive(0, P)
    assert hangs.wait(30)
    sim.remove(0)
    sim.arrive(1, Q)
    sim.wait_for_a_copy()
    assert sim.step().rows == [(1, 1)]
    assert sim.leader.reports.cpu_cache_state().peak == 1
    end.set()


def test_a_copy_an_install_still_uses_counts_after_its_drop(
    sim: AdmissionSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.arrive(0, P)
    sim.wait_for_a_copy()
    gate = Gate(monkeypatch, R)
    copy = sim.leader.store.get(P)
    assert copy is not None
    sim.remove(0)
    sim.arrive(1, Q)
    assert sim.leader.store.get(P) is None
    assert sim.leader.reports.cpu_cache_state().memory_bytes == copy.num_bytes and gate.log.empty()
    del copy
    sim.wait_for_a_copy()
    assert gate.events(2) == ["q begins", "q ends"]


def test_a_read_that_fails_leaves_no_memory_behind(
    sim: AdmissionSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []

    def broken(*args: object) -> None:
        built.append(args[0])
        raise AdapterError("its numbers are not finite")

    monkeypatch.setattr("mstar_tp.lora.reading.shards._largest", broken)
    sim.arrive(0, P)
    sim.wait_for_a_copy()
    assert sim.leader.reports.cpu_cache_state().memory_bytes == 0 and len(built) == 1
    (entry,) = sim.leader.reports.failed_reads()
    assert (entry.adapter, entry.rank) == (P, 0) and "not finite" in entry.cause
    sim.step()
    monkeypatch.undo()
    told = sim.visits[0].failed or ""
    assert "on rank 0" in told and "its numbers are not finite" in told
    sim.arrive(1, P)
    sim.wait_for_a_copy()
    assert sim.leader.reports.failed_reads() == (), "a later read succeeded"
    assert sim.step().rows == [(1, 1)]


def test_an_early_read_counts_and_goes_first_when_a_hold_needs_its_room(
    sim: AdmissionSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, R)
    sim.leader.fetches.read_early(P)
    assert gate.events(2) == ["p begins", "p ends"]
    sim.leader.fetches.read_early(Q)  # no room: nothing is begun
    sim.arrive(0, R)
    assert gate.reached.wait(30), "p's copy, which nobody had asked for, is gone"
    gate.open.set()
    sim.wait_for_a_copy()
    assert gate.events(2) == ["r begins", "r ends"]
    assert sim.leader.reports.cpu_cache_state().peak == 1
