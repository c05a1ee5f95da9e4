"""Pins the threads that wait for storage: a job that hangs holds up no other, is given up on once,
and never keeps its threads from being bounded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from mstar_tp.engine.resources.lora.cpu_cache.worker_threads import WorkerThreads

GUARD_S = 120.0
LONG_S = 3600.0
Make = Callable[..., WorkerThreads]


class Gate:
    """A job that says it has started and waits to be let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()
        self.given_up: SimpleQueue[str] = SimpleQueue()

    def run(self) -> None:
        self.started.set()
        self.go.wait(GUARD_S)
        self.ended.set()


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    gates = [Gate() for _ in range(6)]
    yield gates
    for gate in gates:
        gate.go.set()


@pytest.fixture
def make(gates: list[Gate]) -> Iterator[Make]:
    made: list[WorkerThreads] = []

    def make(**how: float) -> WorkerThreads:
        threads = WorkerThreads("test", 2, **{"timeout_s": LONG_S, **how})  # type: ignore[arg-type]
        made.append(threads)
        return threads

    yield make
    for gate in gates:
        gate.go.set()
    for threads in made:
        threads.close()


def submit(threads: WorkerThreads, *gates: Gate) -> None:
    for gate in gates:
        threads.submit(gate.run, gate.given_up.put)


def test_as_many_jobs_run_at_once_as_asked_for_and_the_next_when_one_ends(
    make: Make, gates: list[Gate]
) -> None:
    submit(make(slow_s=LONG_S), *gates[:3])
    for gate in gates[:2]:
        assert gate.started.wait(GUARD_S)
    assert not gates[2].started.is_set()
    gates[0].go.set()
    assert gates[2].started.wait(GUARD_S)


def test_a_slow_job_is_made_up_for_and_the_extra_thread_goes_when_it_ends(
    make: Make, gates: list[Gate]
) -> None:
    threads = make(slow_s=0.0)
    submit(threads, *gates[:5])
    for gate in gates[:5]:
        assert gate.started.wait(GUARD_S), "jobs waited for slow ones"
    for gate in gates[:5]:
        gate.go.set()
        assert gate.ended.wait(GUARD_S)
    with threads._changed:
        assert threads._changed.wait_for(lambda: len(threads._threads) == 2, GUARD_S)
    submit(threads, gates[5])
    assert gates[5].started.wait(GUARD_S)


def test_threads_are_bounded_however_many_jobs_are_slow(make: Make, gates: list[Gate]) -> None:
    threads = make(slow_s=0.0, max_threads=3)
    submit(threads, *gates)
    for gate in gates[:3]:
        assert gate.started.wait(GUARD_S)
    assert len(threads._threads) == 3 and not gates[3].started.is_set()
    gates[1].go.set()
    assert gates[3].started.wait(GUARD_S)


def test_a_job_past_its_deadline_is_given_up_on_once_and_others_go_on(
    make: Make, gates: list[Gate]
) -> None:
    threads = make(timeout_s=0.0)
    submit(threads, *gates[:4])
    for gate in gates[:4]:
        assert gate.given_up.get(timeout=GUARD_S) == "within 0 s"
        assert gate.started.wait(GUARD_S) and not gate.ended.is_set()
        gate.go.set()
        assert gate.ended.wait(GUARD_S)
        assert gate.given_up.empty()


def test_when_as_many_hang_as_there_may_be_what_waits_is_given_up_on_at_once(
    make: Make, gates: list[Gate]
) -> None:
    threads = make(timeout_s=0.0, max_threads=2)
    submit(threads, *gates[:2])
    for gate in gates[:2]:
        assert gate.given_up.get(timeout=GUARD_S)
    submit(threads, gates[2])
    assert "2 earlier ones still hang" in gates[2].given_up.get(timeout=GUARD_S)
    assert not gates[2].started.is_set()
    gates[0].go.set()
    with threads._changed:
        assert threads._changed.wait_for(lambda: len(threads._busy) == 1, GUARD_S)
    submit(threads, gates[3])
    assert gates[3].started.wait(GUARD_S), "storage is back, and nobody is served"


def test_a_job_that_raises_ends_no_thread(make: Make, gates: list[Gate]) -> None:
    threads = make(slow_s=LONG_S)

    def broken() -> None:
        raise MemoryError

    for _ in range(4):
        threads.submit(broken, gates[0].given_up.put)
    submit(threads, gates[0])
    assert gates[0].started.wait(GUARD_S)


def test_a_closed_pool_starts_nothing_and_waits_for_no_job_that_hangs(
    make: Make, gates: list[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar_tp.engine.resources.lora.cpu_cache.worker_threads.CLOSE_S", 0.0)
    threads = make(slow_s=LONG_S)
    submit(threads, *gates[:3])
    for gate in gates[:2]:
        assert gate.started.wait(GUARD_S)
    threads.close()
    submit(threads, gates[3])
    gates[0].go.set()
    gates[1].go.set()
    for thread in [*threads._threads]:
        thread.join(GUARD_S)
    assert not gates[2].started.is_set() and not gates[3].started.is_set()


def test_a_thread_that_waits_keeps_nothing_of_its_last_job_alive(make: Make) -> None:
    class Copy:
        def use(self) -> None:
            pass

    gone = threading.Event()

    def job() -> Callable[[], None]:
        copy = Copy()
        weakref.finalize(copy, gone.set)
        return copy.use

    make().submit(job(), lambda why: None)
    assert gone.wait(GUARD_S)
