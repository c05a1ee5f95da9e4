"""The recordings of a chaos run: replayed at its end, and kept when something was wrong."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chaos_report import Report


def commands(recording: Path, tp: int) -> list[list[str]]:
    """The commands that replay each rank's tables, and each follower's with the leader's."""
    leader, *followers = [f"{recording}.rank{rank}" for rank in range(tp)]
    if not followers:
        return [["replay", leader]]
    against = [["replay", leader, "--compare", follower] for follower in followers]
    return [*against, *(["replay", follower] for follower in followers)]


def check(recording: Path, tp: int, report: Report) -> None:
    """Every rank's tables are what the order makes of them, and the leader's."""
    for args in commands(recording, tp):
        done = subprocess.run(
            [sys.executable, "-m", "mstar_tp", *args], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout)[-2000:]
            report.violation("divergence", f"mstar-tp {shlex.join(args)} says: {said}")


def keep(recording: Path, tp: int, log: str) -> str:
    """Put recordings and the server's log where they stay; what to run to see them again."""
    folder = Path(tempfile.mkdtemp(prefix="mstar-chaos-failed-"))
    for file in recording.parent.glob(f"{recording.name}.*"):
        shutil.copy(file, folder)
    (folder / "server.log").write_text(log, encoding="utf-8")
    lines = [f"mstar-tp {shlex.join(args)}" for args in commands(folder / recording.name, tp)]
    return "\n".join([f"the server's log: {folder / 'server.log'}", "replay it with:", *lines])
