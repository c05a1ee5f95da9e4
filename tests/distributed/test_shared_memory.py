"""Pins that collectives over shared memory are torch's sums in rank order, bit for bit, for two to
five processes; that ranks in different calls, lost, late or stopped end as they should; and that a
group does without where one rank cannot share.

One process starts all ranks; each check that its ranks passed is a test here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_memory_checks import CHECKS

from mstar_tp.kernels.cpu import cpu_kernels

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or cpu_kernels(torch.device("cpu"), torch.float32) is None,
    reason="no shared memory without Linux and a C++ compiler",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    checks = Path(__file__).with_name("shared_memory_checks.py")
    command = [sys.executable, str(checks), str(tmp_path_factory.mktemp("stores"))]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )


@pytest.mark.parametrize(
    "check",
    [f"{size} {check.__name__}" for size, checks in CHECKS.items() for check in checks],
)
def test_ranks_passed(ranks: subprocess.CompletedProcess[str], check: str) -> None:
    assert f"passed {check}\n" in ranks.stdout, ranks.stdout + ranks.stderr


def test_no_rank_failed(ranks: subprocess.CompletedProcess[str]) -> None:
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr
