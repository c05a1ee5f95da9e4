"""The server's processes as the system sees them: none may be left, none may pile up files."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process, not to be mistaken for a later one with its number."""

    pid: int
    start: str
    is_rank: bool

    @property
    def alive(self) -> bool:
        found = _process(self.pid)
        return found is not None and found.start == self.start

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def resident_mb(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") >> 20


def family(pid: int) -> list[Process]:
    """``pid`` and all below it, parents first."""
    process = _process(pid)
    if process is None:
        return []
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return [process, *(one for child in children for one in family(child))]


def _process(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    state, start = stat[0], stat[19]
    if state == "Z":
        return None
    # torchrun's own command line names the worker's module too.
    is_rank = b"mstar_tp.worker" in command and b"torch.distributed.run" not in command
    return Process(pid, start, is_rank)
