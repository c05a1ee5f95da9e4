"""``scripts/gpu_check.py`` runs every check that needs no device, and says what it left out; with
it the kernels beside the linears and those of experts are checked in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import device_checks
from support.device_checks import DeviceCheck

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_all_that_needs_no_device_is_right_and_the_rest_is_told() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--interpret", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    outcomes = {line["check"]: line["outcome"] for line in report["tables"][0]["rows"]}
    assert outcomes == {c.name: "left out" if c.cuda else "right" for c in device_checks.CHECKS}
    timed = {line["op"] for line in report["tables"][1]["rows"]}
    late = any("no time left" in note for note in report["tables"][1]["notes"])
    assert late or {"lora o", "experts gate_up"} <= timed


def test_what_is_wrong_fails_or_is_left_out_is_told_and_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(device: torch.device, tiny: bool) -> None:
        raise AssertionError("7 is not 8")

    def broken(device: torch.device, tiny: bool) -> None:
        raise RuntimeError("no memory")

    checks = (
        DeviceCheck(name="first", run=off),
        DeviceCheck(name="second", run=broken),
        DeviceCheck(name="third", run=off, modules=("no_such_module",)),
        DeviceCheck(name="fourth", run=lambda device, tiny: None),
    )
    monkeypatch.setattr(device_checks, "CHECKS", checks)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--interpret", "--no-timings", "--json"])
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main() == 1
    told = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    assert [(line["outcome"], line["why"]) for line in told] == [
        ("WRONG", "AssertionError: 7 is not 8"),
        ("FAILED", "RuntimeError: no memory"),
        ("left out", "no_such_module cannot be imported"),
        ("right", ""),
    ]
    monkeypatch.setattr(device_checks, "CHECKS", checks[3:])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--budget", "-1"])
    assert main() == 0, "what there was no time for is not wrong"
    assert "no time left" in capsys.readouterr().out
