"""The admit fence ends for each of the ways a step's admit can end, and for no other reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from mstar_tp.engine.step_thread import StepResult, StepThread
from mstar_tp.wire.messages import Checks, Step
from mstar_tp.worker.fence import AdmitFence

CHECKS = Checks(slots=0, pages=0, tier=0, tokens=0)


def _step(tp_seq: int) -> Step:
    return Step(ingested=0, tp_seq=tp_seq, rows=(), checks=CHECKS)


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

    def run(step: Step, settled: Callable[[], None]) -> StepResult:
        in_admit.set()
        assert admit.wait(30)
        settled()
        in_forward.set()
        assert leave.wait(30)
        return StepResult(tp_seq=step.tp_seq)

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

    def run(step: Step, settled: Callable[[], None]) -> StepResult:
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

    def run(step: Step, settled: Callable[[], None]) -> StepResult:
        raise AssertionError("never reached")

    thread = StepThread(run, fence, lambda: None, prepare)
    thread.submit(_step(0))
    thread.start()
    fence.wait_settled(0, "test")
    (result,) = thread.results()
    assert isinstance(result.error, RuntimeError)


def test_a_long_wait_says_who_waits_for_what_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fence = AdmitFence(warn_after_s=0.01)
    warned = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.set()

    logger = logging.getLogger("mstar_tp.worker.fence")
    watch = Watch()
    logger.addHandler(watch)
    try:
        waiter = Waiter(lambda: fence.wait_settled(3, "rank 1, the remove of request 9,"))
        assert warned.wait(30)
        assert not waiter.passed.is_set()
    finally:
        logger.removeHandler(watch)
    fence.settle(3)
    assert waiter.passed.wait(30)
    assert "rank 1, the remove of request 9, waits for the admit of step 3" in caplog.text
