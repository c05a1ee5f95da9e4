"""A minute of chaos at two ranks, with a fixed seed: see ``scripts/chaos.py`` for what it does.

Every answer is compared with transformers and PEFT; nothing may diverge, leak, hang or fail without
a reason, and no step may wait for a read, though one rank's reads take seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
WANTED = (
    "right", "stopped", "left", "not served", "failed", "loads", "unloads", "folders hidden",
    "slowed a rank's reads", "unloads that raced a load", "loads that raced each other",
)  # fmt: skip
"""What the run must have done to mean anything."""


@pytest.mark.timeout(280)
def test_a_minute_of_chaos_leaves_every_answer_right_and_nothing_behind() -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "60", "--seed", "1", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z' ]+)", done.stdout)}
    missing = [kind for kind in WANTED if not counts.get(kind)]
    assert not missing, done.stdout
