"""The step thread goes from one submitted step to the next by itself, and wakes the main thread
only for what that thread acts on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mstar_tp.engine.step_thread import StepResult, StepThread, WakeAt
from mstar_tp.wire.messages import Checks, Step
from mstar_tp.worker.fence import AdmitFence

CHECKS = Checks(slots=0, pages=0, tier=0, served=0, tokens=0)


def _step(tp_seq: int) -> Step:
    return Step(ingested=0, tp_seq=tp_seq, planned_after=tp_seq - 2, rows=(), checks=CHECKS)


class Steps:
    """A step thread whose steps note what happens; step ``fails`` raises."""

    def __init__(self, wake_at: WakeAt, fails: int | None = None) -> None:
        self.events: list[str] = []
        self.launched = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self._fails = fails
        self.fence = AdmitFence()
        self.thread = StepThread(
            self._run, self.fence, lambda: self.events.append("wake"), wake_at=wake_at
        )
        self.thread.start()

    def _run(self, step: Step, settled: Callable[[], None]) -> StepResult:
        if step.tp_seq == self._fails:
            raise RuntimeError("the step failed")
        self.events.append(f"admit {step.tp_seq}")
        settled()
        self.launched.release()
        assert self.go_on.acquire(timeout=30)
        self.events.append(f"end {step.tp_seq}")
        return StepResult(tp_seq=step.tp_seq)


def test_a_submitted_step_starts_though_the_main_thread_has_not_taken_the_last_result() -> None:
    steps = Steps(WakeAt.ERROR)
    for tp_seq in range(3):
        steps.thread.submit(_step(tp_seq))
        steps.go_on.release()
    steps.fence.wait_done(2, "test")
    assert steps.thread.stop(30)
    assert [result.tp_seq for result in steps.thread.results()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("wake_at", "wanted"),
    [
        (WakeAt.LAUNCH, "admit 0, wake, end 0, admit 1, wake, end 1, wake"),
        (WakeAt.RESULT, "admit 0, end 0, wake, admit 1, end 1, wake"),
        (WakeAt.ERROR, "admit 0, end 0, admit 1, end 1"),
    ],
)
def test_the_main_thread_is_woken_for_what_it_acts_on(wake_at: WakeAt, wanted: str) -> None:
    steps = Steps(wake_at)
    steps.thread.submit(_step(0))
    assert steps.launched.acquire(timeout=30)
    steps.thread.submit(_step(1))
    steps.go_on.release()
    steps.go_on.release()
    steps.fence.wait_done(1, "test")
    assert steps.thread.stop(30)
    assert ", ".join(steps.events) == wanted


@pytest.mark.parametrize("wake_at", WakeAt)
def test_an_error_wakes_the_main_thread_though_another_step_waits(wake_at: WakeAt) -> None:
    steps = Steps(wake_at, fails=0)
    steps.thread.submit(_step(0))
    steps.thread.submit(_step(1))
    assert steps.thread.stop(30)
    assert steps.events[-1] == "wake"
    assert "admit 1" not in steps.events
    (result,) = steps.thread.results()
    assert isinstance(result.error, RuntimeError)
