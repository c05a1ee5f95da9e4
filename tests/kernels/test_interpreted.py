"""Runs the tests that need Triton's interpreter, which is chosen as Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("module", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_kernels_are_right_in_the_interpreter(module: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("--hypothesis-profile", "few", str(HERE / module)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
