"""The step thread goes from one submitted step to the next by itself, and wakes the main thread
only for what that thread acts on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mstar_tp.engine.step.step_thread import StepResult, StepThread, WakeAt
from mstar_tp.wire.schedule import Checks, Step
from mstar_tp.worker.fence import AdmitFence

CHECKS = Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0)


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

    def _run(self, step: Step, settled: Callable[[], None]) -> list[StepResult]:
        if step.tp_seq == self._fails:
            raise RuntimeError("the step failed")
        self.events.append(f"admit {step.tp_seq}")
        settled()
        self.launched.release()
        assert self.go_on.acquire(timeout=30)
        self.events.append(f"end {step.tp_seq}")
        return [StepResult(tp_seq=step.tp_seq)]


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


class Device:
    """Steps whose results come from ``flush``, once ``landed`` is set."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: list[int] = []
        self.landed = threading.Event()
        self.launches = threading.Semaphore(0)

    def run(self, step: Step, settled: Callable[[], None]) -> list[StepResult]:
        settled()
        self.events.append(f"launch {step.tp_seq}")
        ended = self.flush()
        self.running.append(step.tp_seq)
        self.launches.release()
        return ended

    def flush(self) -> list[StepResult]:
        ended, self.running = self.running, []
        self.events += [f"end {tp_seq}" for tp_seq in ended]
        return [StepResult(tp_seq=tp_seq) for tp_seq in ended]

    def has_landed(self) -> bool:
        return self.landed.is_set()


def test_a_step_that_comes_while_another_runs_on_the_device_is_launched_before_that_ends() -> None:
    device, fence = Device(), AdmitFence()
    thread = StepThread(device.run, fence, lambda: None, on_device=device)
    thread.start()
    for tp_seq in range(2):
        thread.submit(_step(tp_seq))
        assert device.launches.acquire(timeout=30)
    assert thread.running_for_s() > 0, "a device that hangs would go unnoticed"
    device.landed.set()
    fence.wait_done(1, "the last step, behind which none follows")
    thread.submit(_step(2))
    assert thread.stop(30), "what was submitted ends first"
    assert device.events == ["launch 0", "launch 1", "end 0", "end 1", "launch 2", "end 2"]
    results = thread.results()
    assert [result.tp_seq for result in results] == [0, 1, 2]
    assert results[1].launched_at >= results[0].ended_at, "a device runs one step at a time"
