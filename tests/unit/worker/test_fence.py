"""The admit fence ends for each of the ways a step's admit can end, and for no other reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from mstar_tp.engine.step.step_thread import StepResult, StepThread
from mstar_tp.wire.schedule import Checks, Step
from mstar_tp.worker.fence import AdmitFence

CHECKS = Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0)


def _step(tp_seq: int) -> Step:
    return Step(ingested=0, tp_seq=tp_seq, planned_after=tp_seq - 1, rows=(), checks=CHECKS)


class Waiter:
    """A main thread at the fence."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.passed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def _run(self, wait: Callable[[], None]) -> None:
        wait()
        self.passed.set()


def test_a_remove_waits_for_the_admit_and_not_for_the_forward() -> None:
    fence = AdmitFence()
    in_admit, in_forward, leave = threading.Event(), threading.Event(), threading.Event()
    admit = threading.Event()

    def run(step: Step, settled: Callable[[], None]) -> list[StepResult]:
        in_admit.set()
        assert admit.wait(30)
        settled()
        in_forward.set()
        assert leave.wait(30)
        return [StepResult(tp_seq=step.tp_seq)]

    thread = StepThread(run, fence, lambda: None)
    thread.start()
    thread.submit(_step(0))
    assert in_admit.wait(30)
    waiter = Waiter(lambda: fence.wait_settled(0, "test"))
    device = Waiter(lambda: fence.wait_done(0, "test"))
    assert not waiter.passed.is_set()
    admit.set()
    assert waiter.passed.wait(30)
    assert in_forward.wait(30)
    assert not device.passed.is_set()
    leave.set()
    assert device.passed.wait(30)
    assert thread.stop(30)


def test_a_step_that_fails_in_its_admit_ends_the_wait_and_every_later_one() -> None:
    fence = AdmitFence()

    def run(step: Step, settled: Callable[[], None]) -> list[StepResult]:
        raise RuntimeError("the admit failed")

    thread = StepThread(run, fence, lambda: None)
    thread.start()
    thread.submit(_step(0))
    fence.wait_done(0, "test")
    fence.wait_settled(7, "test")
    (result,) = thread.results()
    assert isinstance(result.error, RuntimeError)
    assert thread.stop(30)


def test_a_step_thread_that_cannot_start_ends_the_wait() -> None:
    fence = AdmitFence()

    def prepare() -> None:
        raise RuntimeError("no device")

    def run(step: Step, settled: Callable[[], None]) -> list[StepResult]:
        raise AssertionError("never reached")

    thread = StepThread(run, fence, lambda: None, prepare)
    thread.submit(_step(0))
    thread.start()
    fence.wait_settled(0, "test")
    (result,) = thread.results()
    assert isinstance(result.error, RuntimeError)


def test_a_thread_that_the_system_refuses_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fence = AdmitFence()
    thread = StepThread(lambda step, settled: [StepResult(tp_seq=0)], fence, lambda: None)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        thread.start()
    thread.submit(_step(0))
    fence.wait_settled(0, "test")
    fence.wait_done(0, "test")


def test_a_plan_that_raises_ends_the_wait_of_its_own_step_and_not_before() -> None:
    fence = AdmitFence()
    in_plan, plan = threading.Event(), threading.Event()

    def run(step: Step, settled: Callable[[], None]) -> list[StepResult]:
        if step.tp_seq == 0:
            settled()
            return [StepResult(tp_seq=0)]
        in_plan.set()
        assert plan.wait(30)
        raise RuntimeError("the plan failed")

    thread = StepThread(run, fence, lambda: None)
    thread.start()
    thread.submit(_step(0))
    thread.submit(_step(1))
    assert in_plan.wait(30)
    fence.wait_done(0, "step 0 is over")
    waiter = Waiter(lambda: fence.wait_settled(1, "test"))
    assert not waiter.passed.is_set()
    plan.set()
    assert waiter.passed.wait(30)
    fence.wait_done(1, "a step that failed has left the device too")
    assert isinstance(thread.results()[-1].error, RuntimeError)


def test_a_step_submitted_to_a_thread_that_has_ended_ends_the_wait() -> None:
    fence = AdmitFence()
    thread = StepThread(lambda step, settled: [StepResult(tp_seq=0)], fence, lambda: None)
    thread.start()
    assert thread.stop(30)
    thread.submit(_step(0))
    fence.wait_settled(0, "test")
    fence.wait_done(0, "test")


def test_a_long_wait_says_again_and_again_who_waits_for_what_and_never_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fence = AdmitFence(warn_after_s=0.01)
    warnings = threading.Semaphore(0)

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.release()

    logger = logging.getLogger("mstar_tp.worker.fence")
    watch = Watch()
    logger.addHandler(watch)
    try:
        waiter = Waiter(lambda: fence.wait_settled(3, "rank 1, the remove of request 9,"))
        for _ in range(3):
            assert warnings.acquire(timeout=30)
        fence.settle(2)
        fence.finish(2)
        assert warnings.acquire(timeout=30), "another step's end is not the one waited for"
        assert not waiter.passed.is_set()
    finally:
        logger.removeHandler(watch)
    fence.settle(3)
    assert waiter.passed.wait(30)
    assert "rank 1, the remove of request 9, waits for the admit of step 3" in caplog.text


def test_the_warning_comes_every_ten_seconds() -> None:
    waited: list[float | None] = []

    class Clock(threading.Condition):
        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) == 4:
                fence.settle(0)
            return predicate()

    fence = AdmitFence()
    fence._moved = Clock()
    fence.wait_settled(0, "test")
    assert waited == [10.0] * 4
