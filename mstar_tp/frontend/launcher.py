"""Starts the ranks of one machine as a child process, and makes sure that none is left.

The child is torch.distributed's elastic launcher, which starts one worker a rank. Workers lead
sessions of their own, so stopping means finding every descendant first. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mstar_tp.env import child_environment

logger = logging.getLogger(__name__)

KEPT_LINES = 30
"""Of the child's output: shown when no rank could say itself why it ended."""
MAX_LINE_BYTES = 1 << 20
KILL_AFTER_S = 5.0

_LAUNCHER_ERROR = re.compile(r"E\d{4} .*torch/distributed/")
_LAUNCHER_NOTE = re.compile(r"[WI]\d{4} .*torch/distributed/|\**$|Setting OMP_NUM_THREADS ")
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


class _Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    start_ticks: str


class RankLauncher:
    """The launcher process and all below it. ``on_line`` gets each line that a rank logs."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._family: set[_Process] = set()
        self._reported = False
        self.failed_rank: tuple[int, str] | None = None
        """The first rank that ended badly, as the launcher saw it, and how."""

    async def start(self, world_size: int, worker_args: Sequence[str], scratch: Path) -> None:
        """Start ``world_size`` workers, each with ``worker_args``.

        Whatever they put into a temporary folder goes into ``scratch``, so that nothing outlives a
        worker that was killed.
        """
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--max-restarts", "0", "--nproc-per-node", str(world_size)),
            *("-m", "mstar_tp.worker", *worker_args),
        ]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            # Ctrl-C in a terminal reaches the frontend alone, which then stops the ranks in order.
            start_new_session=True,
            env=child_environment(PYTHONUNBUFFERED="1", TMPDIR=str(scratch)),
        )
        self._output = asyncio.ensure_future(self._read_output())

    async def wait(self) -> int:
        """Until the launcher ends and its output is read; its exit code.

        One that was killed (a negative code) reports on no rank: its output is not waited for.
        """
        assert self._process is not None and self._output is not None
        code = await self._process.wait()
        # A worker that outlives its launcher holds the pipe open: do not wait for that.
        if code >= 0:
            await asyncio.wait([self._output], timeout=KILL_AFTER_S)
        return code

    async def stop(self, timeout_s: float) -> None:
        """End the launcher and every descendant: wait ``timeout_s`` for them to end by themselves,
        then ask, then kill.
        """
        if self._process is None:
            return
        self.note_family()
        if await self._ended(timeout_s):
            self._kill_family()
            return
        if timeout_s:
            logger.warning("the ranks did not stop within %g s: ending them", timeout_s)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self._ended(KILL_AFTER_S)
        self._kill_family()
        await self._ended(KILL_AFTER_S)

    def note_family(self) -> None:
        """Remember which processes there are, for when the launcher that knows them is gone."""
        if self._process is not None:
            self._family |= _descendants(self._process.pid)

    def last_lines(self) -> str:
        """The end of what the child said."""
        return "\n".join(self._last)

    async def _ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _kill_family(self) -> None:
        self.note_family()
        for process in self._family:
            if _identity(process.pid) == process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    async def _read_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # a line longer than the limit: the stream has dropped it
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._keep(text)
            if " rank=" in text and " role=" in text:
                self._on_line(text)

    def _keep(self, text: str) -> None:
        """Up to the launcher's own report on its dead workers, which says nothing they did not."""
        failed = _FAILED_RANK.search(text)
        if failed is not None and self.failed_rank is None:
            self.failed_rank = (int(failed[2]), _exit(int(failed[1])))
        self._reported = self._reported or _LAUNCHER_ERROR.match(text) is not None
        if not self._reported and not _LAUNCHER_NOTE.match(text):
            self._last.append(text)


def _descendants(pid: int) -> set[_Process]:
    """``pid`` and all below it, as /proc shows them now."""
    found: set[_Process] = set()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        process = _identity(one)
        if process is None or process in found:
            continue
        found.add(process)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting.extend(int(child) for child in (task / "children").read_text().split())
    return found


def _identity(pid: int) -> _Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, in parentheses, is the command and may hold spaces; the start is the 22nd.
    return _Process(pid, stat.rpartition(")")[2].split()[19])


def _exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    return f"its process was ended by signal {-code}"
