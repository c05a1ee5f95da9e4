"""Pins histograms against prometheus_client's own, and a step's clock against a count by hand."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from mstar_tp.common import histogram
from mstar_tp.common.histogram import Histogram
from mstar_tp.engine.step import step_clock
from mstar_tp.engine.step.step_clock import LEADER_PHASES, STEP_PHASES, StepClock


@pytest.mark.parametrize(
    "bounds",
    [histogram.STEP_S, histogram.WAIT_S, histogram.TOKEN_S, histogram.WHOLE_S, histogram.NUM_ROWS],
)
def test_values_are_counted_as_prometheus_counts_them(bounds) -> None:
    draw = random.Random(1)
    theirs = TheirHistogram("x", "x", buckets=bounds, registry=CollectorRegistry())
    ours = Histogram(bounds)
    values = [*bounds, 0.0, *(draw.expovariate(1 / bound) for bound in bounds for _ in range(20))]
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    found = ours.buckets()
    (family,) = theirs.collect()
    samples = [s.value for s in family.samples if s.name == "x_bucket"]
    assert [sum(found.counts[: i + 1]) for i in range(len(samples))] == samples
    assert found.sum == pytest.approx(sum(values))


def test_a_lap_goes_to_its_phase_and_a_step_to_its_size(monkeypatch) -> None:
    now = iter([10.0, 10.001, 10.011, 20.0, 20.5])
    monkeypatch.setattr(step_clock, "perf_counter", lambda: next(now))
    clock, leader = StepClock(STEP_PHASES), StepClock(LEADER_PHASES)
    clock.begin()
    clock.lap("admit")
    clock.lap("forward")
    clock.runs(3, 130)
    leader.begin()
    leader.lap("schedule")
    stats = clock.stats(leader)
    took = {phase.phase: phase.seconds for phase in stats.phases}
    assert list(took) == [*LEADER_PHASES, *STEP_PHASES]
    assert {phase: sum(of.counts) for phase, of in took.items() if sum(of.counts)} == {
        "schedule": 1, "admit": 1, "forward": 1,
    }  # fmt: skip
    assert took["admit"].sum == pytest.approx(0.001)
    assert took["forward"].sum == pytest.approx(0.01)
    assert took["schedule"].sum == pytest.approx(0.5)
    assert stats.rows.counts[histogram.NUM_ROWS.index(4)] == 1
    assert stats.tokens.counts[histogram.NUM_TOKENS.index(256)] == 1
