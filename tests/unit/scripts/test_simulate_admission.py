"""Pins scripts/simulate_admission.py: the product's waits are those of a schedule worked out by
hand, the bound is checked, and the oracle keeps to the slots and rows there are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import simulate_admission

SMALL = ["--requests", "150", "--adapters", "12", "--slots", "2", "--rows", "6", "--gap", "9"]


def options() -> argparse.Namespace:
    args = argparse.Namespace(requests=150, adapters=12, slots=2, rows=6, gap=9.0, zipf=1.1)
    args.seed, args.min_output, args.max_output = 4, 2, 20
    return args


def test_the_product_admits_as_a_plain_schedule_in_arrival_order_does() -> None:
    args = options()
    jobs = simulate_admission.draw_jobs(args)
    ours = simulate_admission.simulate(jobs, args, args.adapters, 0)
    oracle = simulate_admission.Oracle(jobs, args.slots, args.rows)
    by_arrival = oracle.waits(list(range(len(jobs))), may_pass=False)
    assert ours == simulate_admission.Waits.of(by_arrival)
    assert ours.values[-1] > 20, "nothing waited: the comparison says nothing"


def test_an_oracle_finds_no_worse_order_than_arrival_and_keeps_the_longest_wait() -> None:
    args = options()
    jobs = simulate_admission.draw_jobs(args)
    oracle = simulate_admission.Oracle(jobs, args.slots, args.rows)
    arrival = simulate_admission.Waits.of(oracle.waits(range(len(jobs)), may_pass=False))
    _, best = oracle.best(arrival.values[-1], 10, 0)
    assert best.share(0.95) <= arrival.share(0.95) and best.values[-1] <= arrival.values[-1]


def test_the_report_says_the_bound_and_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_admission.main([*SMALL, "--tries", "3", "--steps", "300"]) == 0
    out = capsys.readouterr().out
    assert out.count("past the bound        0 of 150") == 2
    assert "best order found by an oracle" in out and "p95 against the oracle's" in out
    assert "cold ones by arrival" in out and "cold ones by turns" in out


def test_a_share_of_the_waits() -> None:
    waits = simulate_admission.Waits.of([5, 1, 4, 2, 3])
    assert [waits.share(part) for part in (0.2, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]
