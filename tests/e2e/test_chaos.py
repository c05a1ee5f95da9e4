"""Chaos at two ranks, with a fixed seed: see ``scripts/chaos.py`` for what it does.

Every answer is compared with transformers and PEFT; nothing may diverge, leak, hang or fail without
a reason, and no step may wait for a read, though one rank's reads take seconds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"


@pytest.mark.timeout(280)
def test_chaos_leaves_every_answer_right_and_nothing_behind() -> None:
    """Until everything that a run does was done, and 15 seconds at least."""
    command = [sys.executable, str(SCRIPT), "--seconds", "15", "--seed", "1", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert ", 0 end\n" in done.stdout, done.stdout


@pytest.mark.timeout(600)
def test_processes_that_die_and_hang_change_no_stream_and_leave_nothing() -> None:
    """Until something was killed and something stopped, and 60 seconds at least."""
    command = [sys.executable, str(SCRIPT), "--kill", "--seconds", "60", "--seed", "1", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert ", 0 end\n" in done.stdout and " right" in done.stdout
