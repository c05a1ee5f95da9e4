"""Pins that every part of ``mstar-tp bench`` runs, and that figures are of the work they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import main as run_benchmark
from benchmarks import fleet
from benchmarks.step import PHASES

from mstar_tp.bench.churn import Place, parse_place
from mstar_tp.bench.models import SHAPES
from mstar_tp.bench.report import Table, cell, ratio
from mstar_tp.cli.main import main
from mstar_tp.common.errors import ConfigError


def run(part: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The report of a part on the smallest model."""
    out = tmp_path / "report.json"
    args = [part, "--size", "nano", "--json", str(out), *flags]
    users = part in ("serving", "churn", "prefix")
    assert (main(["bench", *args]) if users else run_benchmark(args)) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["part"] == part and report["command"].startswith(
        f"mstar-tp bench {part}" if users else f"scripts/bench.py {part}"
    )
    assert report["versions"]["torch"] and report["machine"]["cores"] >= 1
    assert isinstance(report, dict)
    return report


def test_kernels_name_the_bytes_and_operations_of_each_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rows", "1,3", "--adapters", "2", "--rank", "4", "--context", "20", "--repeats", "1")
    flags += ("--threads", "1")
    (table,) = run("kernels", tmp_path, *flags)["tables"]
    rows = {(row["op"], row["rows"]): row for row in table["rows"]}
    gemm = rows["gemm gate_up", 3]  # a weight [192, 64] of float32, three rows in and out
    assert gemm["MB"] * 1e6 == pytest.approx(4 * (192 * 64 + 3 * (192 + 64)))
    assert gemm["MFLOP"] * 1e6 == pytest.approx(2 * 3 * 192 * 64)
    delta = rows["lora gate_up", 3]  # two adapters of rank 4 with two A's each; y is read too
    factors = 2 * 4 * (64 + 64 + 96 + 96)
    assert delta["MB"] * 1e6 == pytest.approx(4 * (factors + 3 * (64 + 2 * 192)))
    keys = rows["attention decode", 3]  # keys and values of 20 tokens, queries and outputs
    assert keys["MB"] * 1e6 == pytest.approx(4 * (2 * 3 * 20 * 2 * 16 + 2 * 3 * 64))
    assert {"peft"} == {row["peer"] for row in table["rows"] if row["op"].startswith("lora ")}
    assert ("lora gate_up", 1) not in rows, "one row cannot have two adapters"
    assert rows["all_reduce, tp 2", 2]["peer"] == "gloo"
    printed = capsys.readouterr().out
    assert "| gemm gate_up " in printed and "ceilings: copy" in printed


def test_steps_are_split_into_phases_that_fit_in_the_step(tmp_path: Path) -> None:
    flags = ("--rows", "2", "--adapters", "0,2", "--tokens", "30", "--runs", "1", "--rank", "2")
    report = run("step", tmp_path, *flags)
    base, adapters = report["details"]["cells"]
    assert (base["adapters"], adapters["adapters"]) == (0, 2)
    for stats in (base, adapters):
        phases = stats["phases_us"]
        assert set(phases) == set(PHASES)
        at_tp_1 = {phase for phase, took in phases.items() if took > 0}
        assert at_tp_1 == set(PHASES) - {"broadcast"}
        # 30 tokens: a prompt's step gives the first, and a step has a next one but for the last.
        # Where one prompt came a step later than the other, fewer steps have both rows.
        assert 20 < stats["steps"] <= 28
        assert stats["torch_us"] > 0 and stats["torch_ops"] > 0


def test_adapters_that_take_turns_over_one_slot_and_one_copy_hit_neither(tmp_path: Path) -> None:
    flags = ("--cells", "3/1/1", "--requests", "6", "--concurrency", "1", "--runs", "1")
    flags += ("--rank", "2", "--prompt-tokens", "4", "--max-tokens", "3")
    (table,) = run("churn", tmp_path, *flags)["tables"]
    (row,) = table["rows"]
    assert (row["adapters"], row["slots"], row["CPU cache"]) == (3, 1, 1)
    assert (row["slot hits"], row["CPU cache hits"], row["errors"]) == (0, 0, 0)
    assert row["evictions/s"] == row["reads/s"] > 0
    assert row["loads/s"] > 0 and row["inter-token p95 loading ms"] > 0


def test_a_prefix_that_was_asked_before_is_cached_but_for_its_last_page(tmp_path: Path) -> None:
    flags = ("--prefix-tokens", "40", "--runs", "1", "--rank", "2")
    (table,) = run("prefix", tmp_path, *flags)["tables"]
    assert [(row["model"], row["tokens cached"]) for row in table["rows"]] == [
        ("base", 32),
        ("lora-00", 32),
    ]
    assert all(row["new TTFT ms"] > 0 and row["errors"] == 0 for row in table["rows"])


def test_a_cell_of_churn_is_two_or_three_whole_numbers() -> None:
    assert parse_place("16/8") == Place(16, 8, 16) and parse_place("3/1/2") == Place(3, 1, 2)
    for text in ("16", "16/0", "a/b", "1/2/3/4", "8/-1"):
        with pytest.raises(ConfigError, match="--cells"):
            parse_place(text)


def test_scale_registers_steps_serves_and_loads(tmp_path: Path) -> None:
    flags = ("--registered", "6", "--slots", "4", "--rows", "4", "--runs", "1", "--loads", "5")
    pools, steps, servers = run("scale", tmp_path, *flags, "--rank", "2", "--tokens", "8")["tables"]
    (pool,) = pools["rows"]
    assert 0 < pool["steady admit us"] < pool["admit us, 1 more miss"]
    (step,) = steps["rows"]
    assert (step["registered"], step["tp"]) == (6, 1) and 0 < step["admit us"] < step["step us"]
    assert [row["process"] for row in servers["rows"]] == ["frontend", "rank 0"]
    assert all(row["loads/s"] > 0 for row in servers["rows"])


def test_a_fleet_links_its_files_and_no_file_past_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "LINKS", 3)
    made = fleet.Fleet(tmp_path, SHAPES["nano"], rank=2)
    weights = [Path(path, fleet.WEIGHTS) for path in made.adapters("a", 30).values()]
    assert len({file.stat().st_ino for file in weights}) == 12, "three sets of four kinds"
    assert max(file.stat().st_nlink for file in weights) == 1 + 3
    shared = fleet.Fleet(tmp_path / "shared", SHAPES["nano"], rank=2, folders=2).adapters("a", 5)
    assert len(shared) == 5 and len(set(shared.values())) == 2
    unlike = fleet.Fleet(tmp_path / "unlike", SHAPES["nano"], rank=2, alike=False)
    headers = {Path(p, fleet.WEIGHTS).read_bytes()[:400] for p in unlike.adapters("a", 40).values()}
    assert len(headers) == 32


def test_figures_are_shown_with_four_digits_that_count() -> None:
    shown = [
        cell(value) for value in (None, True, 12345.6, 123.45, 1.2345, 0.12345, 0.0123, 7, "x")
    ]
    assert shown == ["-", "yes", "12,346", "123.5", "1.23", "0.123", "0.0123", "7", "x"]
    assert cell(float("nan")) == "-"


def test_ratios_are_of_medians() -> None:
    assert ratio([1.0, 100.0, 3.0], [2.0, 1.0, 50.0]) == 1.5
    assert ratio([], [1.0]) is None and ratio([1.0], [0.0]) is None


def test_a_row_has_a_cell_for_every_column() -> None:
    table = Table(title="t", columns=("a", "b"))
    table.add(1, "x")
    assert table.as_dicts() == [{"a": 1, "b": "x"}]
    with pytest.raises(AssertionError):
        table.add(1)
