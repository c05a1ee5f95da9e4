"""A server's processes as the system sees them: which they are, whether any is left. Linux only."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RANK = re.compile(r"mstar-rank(\d+)$")
FORKS = "mstar-forks"
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process, not to be mistaken for a later one with its number."""

    pid: int
    start: str
    name: str

    @property
    def rank(self) -> int | None:
        """The process's rank, if it was started by ``mstar-tp serve``."""
        found = _RANK.match(self.name)
        return None if found is None else int(found[1])

    @property
    def alive(self) -> bool:
        found = _process(self.pid)
        return found is not None and found.start == self.start

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def resident_mib(self) -> float:
        """0 when it is gone."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except OSError:
            return 0.0
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def send(self, number: int) -> bool:
        """Send a signal; whether the process was there to get it."""
        if not self.alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def wait_gone(self, timeout_s: float) -> bool:
        """True if the process ended within ``timeout_s``; it need be no child."""
        end = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_EVERY_S)
        return True


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


def ranks(pid: int) -> list[Process]:
    """The ranks below ``pid``, in order."""
    found: dict[int, Process] = {}
    for one in family(pid):
        # What a rank starts has its name until it runs another program: it comes behind the rank.
        if one.rank is not None:
            found.setdefault(one.rank, one)
    return [found[rank] for rank in sorted(found)]


def _process(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    state, start = stat[0], stat[19]
    return None if state == "Z" else Process(pid, start, name)
