"""The step behind one that runs is planned shortly before that one should end, and no guess is made
for a step of a size not seen yet.
"""

from __future__ import annotations

import pytest

from mstar_tp.worker.plan_timer import (
    LEAD_S,
    LEAD_SHARE,
    SHORT_S,
    ImmediatePlanTimer,
    StepEndPlanTimer,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_of_a_size_not_seen_is_waited_for() -> None:
    timer = StepEndPlanTimer(Clock())
    assert timer.wait_s(8, 100.0) is None
    timer.note(8, 0.1)
    assert timer.wait_s(300, 100.0) is None


def test_the_next_step_is_due_the_lead_before_the_shortest_such_step_would_end() -> None:
    clock = Clock()
    timer = StepEndPlanTimer(clock)
    for duration in (0.3, 0.1, 0.2):
        timer.note(8, duration)
    due = 0.1 * (1 - LEAD_SHARE) - LEAD_S
    assert timer.wait_s(8, 100.0) == pytest.approx(due)
    assert timer.wait_s(15, 100.0) == pytest.approx(due), "as many bits: about as long"
    clock.now += 0.05
    assert timer.wait_s(8, 100.0) == pytest.approx(due - 0.05)
    clock.now += 0.05
    assert timer.wait_s(8, 100.0) == 0


def test_old_durations_are_forgotten() -> None:
    timer = StepEndPlanTimer(Clock())
    for duration in (0.03, 0.1, 0.1, 0.1, 0.1):
        timer.note(8, duration)
    wait_s = timer.wait_s(8, 100.0)
    assert wait_s is not None and wait_s > 0.05


def test_short_steps_and_a_leader_that_does_not_wait_plan_now() -> None:
    timer = StepEndPlanTimer(Clock())
    timer.note(8, SHORT_S * 0.9)
    assert timer.wait_s(8, 100.0) == 0
    assert ImmediatePlanTimer().wait_s(8, 100.0) == 0
