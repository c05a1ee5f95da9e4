"""The launcher starts the ranks of one machine, again and again, and leaves none behind.

A child process that has imported all that ranks need forks them (``worker.forkserver``). Ranks die
with it, and it dies with this process: the kernel sees to both. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mstar_tp.common import log
from mstar_tp.common.env import child_environment
from mstar_tp.common.errors import PeerLostError
from mstar_tp.worker.forkserver import Ended, Event, Started, StartRanks

logger = logging.getLogger(__name__)

KEPT_FLOWS = 30
"""The last lines of the ranks' output that are kept, for when no rank could say why it ended."""
MAX_LINE_BYTES = 1 << 20
GONE_WITHIN_S = 5.0
"""The seconds after which a killed process is gone, or the kernel will not let go of it."""
CODE_WITHIN_S = 0.3
"""The seconds within which the exit code of a process that is gone may come."""
LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class _Rank:
    """One rank's process. ``handle`` (a pidfd) is this process and no later one of its number."""

    rank: int
    pid: int
    handle: int
    gone: asyncio.Event
    told: bool = False


class RankLauncher:
    """The forking process, and the group of ranks it started last.

    ``on_line`` gets each line that a rank logs; ``on_exit`` each rank of the present group whose
    process ends, and how, unless it was ended here.
    """

    def __init__(self, on_line: Callable[[str], None], on_exit: Callable[[int, str], None]) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._last: deque[str] = deque(maxlen=KEPT_FLOWS)
        self._forks: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._started: asyncio.Future[Started] | None = None
        self._epoch = -1
        self._ranks: dict[int, _Rank] = {}

    @property
    def pids(self) -> list[int]:
        """The process ids of the present group, by rank."""
        return [self._ranks[rank].pid for rank in sorted(self._ranks)]

    async def start(self, epoch: int, world_size: int, args: Sequence[str], scratch: Path) -> None:
        """Start ``world_size`` ranks as group ``epoch``, each with ``args``.

        The group before is gone. Temporary files of ranks go into ``scratch``, so that nothing
        outlives a rank that was killed.

        Raises:
            PeerLostError: no process can be started, or it ends at once; what it said.
        """
        assert not self._ranks, "the group before is still there"
        self._last.clear()
        self._epoch = epoch
        command = StartRanks(epoch=epoch, world_size=world_size, args=tuple(args))
        for attempt in range(2):
            if self._forks is None or self._forks.returncode is not None:
                await self._spawn(scratch)
            started = await self._ask(command)
            if started is not None:
                self._watch(started)
                return
            logger.warning("the process that starts ranks is gone or stopped: starting another")
            await self._end_forks()
            if attempt:
                break
        raise PeerLostError(f"ranks cannot be started on this machine:\n{self.last_lines()}")

    async def kill(self) -> None:
        """End every rank of the group by force; nobody is told of their exits."""
        ranks, self._ranks = self._ranks, {}
        for rank in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.handle, signal.SIGKILL)
        await self._all_gone(list(ranks.values()), GONE_WITHIN_S)
        for rank in ranks.values():
            self._close(rank)

    async def stop(self, timeout_s: float) -> None:
        """Give the ranks ``timeout_s`` to end by themselves, and leave no process."""
        for rank in self._ranks.values():
            rank.told = True
        if not await self._all_gone(list(self._ranks.values()), timeout_s) and timeout_s:
            logger.warning("the ranks did not stop within %g s: ending them", timeout_s)
        await self.kill()
        await self._end_forks()

    def last_lines(self) -> str:
        """Return the last lines of the ranks' output."""
        return "\n".join(self._last)

    # ------------------------------------------------------------------ the forking process

    async def _spawn(self, scratch: Path) -> None:
        try:
            self._forks = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mstar_tp.worker.forkserver", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                # Ctrl-C in a terminal reaches the frontend alone, which then stops ranks in order.
                start_new_session=True,
                env=child_environment(PYTHONUNBUFFERED="1", TMPDIR=str(scratch)),
            )
        except OSError as error:
            raise PeerLostError(f"ranks cannot be started on this machine: {error}") from None
        assert self._forks.stdout is not None and self._forks.stderr is not None
        self._readers = [
            asyncio.ensure_future(self._read_events(self._forks.stdout)),
            asyncio.ensure_future(self._read_lines(self._forks.stderr)),
        ]

    async def _ask(self, command: StartRanks) -> Started | None:
        """Ask the forking process for ranks; None when it ends first, or is stopped."""
        assert self._forks is not None and self._forks.stdin is not None
        self._started = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(self._forks.wait())
        waits: list[asyncio.Future[Any]] = [self._started, ended]
        try:
            self._forks.stdin.write(msgspec.json.encode(command) + b"\n")
            while not self._started.done():
                await asyncio.wait(
                    waits,
                    timeout=LOOK_EVERY_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not self._started.done() and (ended.done() or _is_stopped(self._forks.pid)):
                    return None
            return self._started.result()
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            ended.cancel()
            self._started = None

    async def _end_forks(self) -> None:
        if self._forks is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._forks.kill()
        await self._forks.wait()
        # What dying ranks said last is read; a rank that cannot die would hold the pipe open.
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        self._forks = None

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        while line := await stream.readline():
            match decoder.decode(line):
                case Started() as started:
                    if self._started is not None and not self._started.done():
                        self._started.set_result(started)
                case Ended(epoch=epoch, rank=rank, code=code):
                    if epoch == self._epoch and rank in self._ranks:
                        self._tell(self._ranks[rank], _exit(code))

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # a line longer than the limit: the stream has dropped it
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._last.append(text)
            if log.is_line(text):
                self._on_line(text)

    # ------------------------------------------------------------------ the ranks' processes

    def _watch(self, started: Started) -> None:
        loop = asyncio.get_running_loop()
        for number, pid in enumerate(started.pids):
            try:
                handle = os.pidfd_open(pid)
            except OSError:
                self._on_exit(number, "its process ended at once")
                continue
            rank = _Rank(number, pid, handle, asyncio.Event())
            self._ranks[number] = rank
            loop.add_reader(handle, self._on_gone, rank)

    def _on_gone(self, rank: _Rank) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(rank.handle)
        rank.gone.set()
        loop.call_later(CODE_WITHIN_S, self._tell, rank, "its process is gone")

    def _tell(self, rank: _Rank, how: str) -> None:
        if not rank.told and self._ranks.get(rank.rank) is rank:
            rank.told = True
            self._on_exit(rank.rank, how)

    async def _all_gone(self, ranks: list[_Rank], timeout_s: float) -> bool:
        waits = [asyncio.ensure_future(rank.gone.wait()) for rank in ranks]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()
        return not late

    def _close(self, rank: _Rank) -> None:
        if not rank.gone.is_set():
            logger.error("process %d of rank %d cannot be ended", rank.pid, rank.rank)
            asyncio.get_running_loop().remove_reader(rank.handle)
        os.close(rank.handle)


def _is_stopped(pid: int) -> bool:
    """Return whether the process was stopped by a signal, so that it answers nobody."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The second field, in parentheses, is the command and may hold anything; then comes the state.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    return f"its process was ended by signal {-code}"
