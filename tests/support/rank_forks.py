"""Ranks for tests, forked from processes that have imported everything.

Importing torch is most of what a tiny model's rank does from its start to its end, so it is done
once for all ranks of a number: one *source* process a rank number, each with a hash seed of its
own, so that an order that follows from ``hash()`` shows. A fork runs what a rank's command line
runs, in an environment and a folder of its own. Sources end with the process that started them.

``python -m support.rank_forks`` is a source: one thread, commands as JSON lines on stdin,
what became of them as JSON lines on stdout.
"""

from __future__ import annotations

import gc
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from mstar_tp.common.errors import MstarError
from mstar_tp.common.os_process import die_with_parent


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Become a rank that runs with ``args``, after the script ``before``."""

    args: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    log: str
    before: str | None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A fork is running (``code`` is None), or has ended."""

    pid: int
    code: int | None


class ForkedRank:
    """One forked rank, asked as ``subprocess.Popen`` is."""

    def __init__(self, pid: int, changed: threading.Condition) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._changed = changed

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises TimeoutExpired."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
            assert self.returncode is not None
            return self.returncode

    def send_signal(self, sig: int) -> None:
        with self._changed:
            if self.returncode is None:
                with suppress(ProcessLookupError):  # its end is on its way here
                    os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Source:
    """A process that forks, for all of this process's life. Any thread."""

    def __init__(self, hash_seed: int) -> None:
        self._changed = threading.Condition()  # guards _ranks and _started, and their ranks; a leaf
        self._ranks: dict[int, ForkedRank] = {}
        self._started: list[ForkedRank] = []
        self._gone = False
        self._starting = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONHASHSEED": str(hash_seed),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        threading.Thread(target=self._read, name="rank-forks", daemon=True).start()

    def start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        before: Path | None = None,
    ) -> ForkedRank:
        """A rank with these arguments, its output in ``log``; first it runs the script ``before``.

        Raises:
            MstarError: the source is gone.
        """
        script = None if before is None else str(before)
        fork = Fork(args=tuple(args), env=dict(env), cwd=str(cwd), log=str(log), before=script)
        assert self._process.stdin is not None
        with self._starting:
            self._process.stdin.write(msgspec.json.encode(fork) + b"\n")
            self._process.stdin.flush()
            with self._changed:
                self._changed.wait_for(lambda: self._gone or bool(self._started))
                if not self._started:
                    raise MstarError("the process that forks ranks for tests is gone")
                return self._started.pop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(Ended)
        for line in self._process.stdout:
            event = decoder.decode(line)
            with self._changed:
                if event.code is None:
                    rank = self._ranks[event.pid] = ForkedRank(event.pid, self._changed)
                    self._started.append(rank)
                else:
                    self._ranks.pop(event.pid).returncode = event.code
                self._changed.notify_all()
        with self._changed:  # the kernel has killed its forks
            self._gone = True
            for rank in self._ranks.values():
                rank.returncode = -signal.SIGKILL
            self._changed.notify_all()


@cache
def source(rank: int) -> Source:
    """The process that forks for rank ``rank`` come from."""
    return Source(1000 + rank)


# ---------------------------------------------------------------------- in a source


def main() -> None:
    """Until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import mstar_tp.worker.__main__  # noqa: F401 - and with it all that a rank needs

    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    commands, running = b"", 0
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                running -= 1
                _say(Ended(pid=pid, code=os.waitstatus_to_exitcode(status)))
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, commands = (commands + data).split(b"\n")
            for line in lines:
                _say(Ended(pid=_fork(msgspec.json.decode(line, type=Fork)), code=None))
                running += 1


def _say(event: Ended) -> None:
    data = msgspec.json.encode(event) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _fork(fork: Fork) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _run(fork, parent)
        finally:
            os._exit(code)
    return pid


def _run(fork: Fork, parent: int) -> int:
    """Become the rank and serve, in the fork; the exit code."""
    from mstar_tp.worker.__main__ import serve_rank

    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(fork.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    os.chdir(fork.cwd)
    os.environ.clear()
    os.environ.update(fork.env)
    if fork.before is not None:
        runpy.run_path(fork.before)
    code = serve_rank(fork.args)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
