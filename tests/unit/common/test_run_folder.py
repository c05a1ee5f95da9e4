"""Pins that a folder goes with its owner: at its end, or at the next start when it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mstar_tp.common.run_folder import RunFolder, sweep

OWNER = """
import sys
from mstar_tp.common.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_its_owners_until_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    theirs = Path(owner.stdout.readline().strip())
    mine = RunFolder(tmp_path)
    assert oct(mine.path.stat().st_mode)[-3:] == "700"
    assert sweep(tmp_path) == [] and theirs.is_dir() and mine.path.is_dir()
    owner.kill()
    owner.communicate()
    assert sweep(tmp_path) == [theirs] and not theirs.exists() and mine.path.is_dir()
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_owned_folder_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("mstar-run-bare", "mstar-abc", ".mstar-new-fresh")]
    for other in others:
        other.mkdir()
    (tmp_path / "mstar-run-file").write_text("x")
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "owner").write_text("")
    os.symlink(real, tmp_path / "mstar-run-link")
    assert sweep(tmp_path) == []
    assert all(path.exists() for path in (*others, real, tmp_path / "mstar-run-file"))
