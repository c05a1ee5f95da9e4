"""Starts ranks on this machine by forking a process that has imported everything already.

``mstar-tp serve`` runs one: ``python -m mstar_tp.worker.forkserver PARENT``. Importing torch takes
longer than all else in a small model's start; here it is paid once, however often ranks are
started. Commands come as JSON lines on stdin, events leave as JSON lines on stdout, and what ranks
log goes to stderr. One thread. No device is touched and no thread started before a fork.

Nobody outlives anybody: the kernel kills this process when its parent ends, and ranks with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys

import msgspec

from mstar_tp.common.env import become_rank
from mstar_tp.common.os_process import die_with_parent, name_process

ENDED_BADLY = 1


class StartRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Start ``world_size`` ranks of ``epoch``; each is given ``args``."""

    epoch: int
    world_size: int
    args: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The processes of ``epoch``, by rank."""

    epoch: int
    pids: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's process has ended: ``code`` as subprocess says it, negative for a signal."""

    epoch: int
    rank: int
    code: int


Event = Started | Ended


def main() -> int:
    """Until stdin ends. Exit code 0."""
    parent = int(sys.argv[1])
    name_process("mstar-forks")
    die_with_parent(parent)
    # A group started in this session gets Ctrl-C from nobody; SIGTERM is meant for its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import mstar_tp.worker.__main__  # noqa: F401 - and with it all that a rank needs

    gc.collect()
    gc.freeze()  # what is shared now stays shared: no collection writes to it
    return _Server().run()


class _Server:
    def __init__(self) -> None:
        self._children: dict[int, tuple[int, int]] = {}
        self._commands = b""
        self._decoder = msgspec.json.Decoder(StartRanks)
        self._encoder = msgspec.json.Encoder()
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> int:
        while True:
            ready, _, _ = select.select([0, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if 0 in ready and not self._take_commands():
                return 0

    def _take_commands(self) -> bool:
        """False at the end of stdin."""
        data = os.read(0, 1 << 16)
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            command = self._decoder.decode(line)
            pids = tuple(self._fork(command, rank) for rank in range(command.world_size))
            self._send(Started(epoch=command.epoch, pids=pids))
        return bool(data)

    def _fork(self, command: StartRanks, rank: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = ENDED_BADLY
            try:
                code = _run_rank(command, rank, parent)
            finally:
                os._exit(code)
        self._children[pid] = (command.epoch, rank)
        return pid

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            epoch, rank = self._children.pop(pid)
            self._send(Ended(epoch=epoch, rank=rank, code=os.waitstatus_to_exitcode(status)))

    def _send(self, event: Event) -> None:
        data = self._encoder.encode(event) + b"\n"
        while data:
            data = data[os.write(1, data) :]


def _run_rank(command: StartRanks, rank: int, parent: int) -> int:
    """Become rank ``rank`` in the fork and serve; return the exit code."""
    from mstar_tp.worker.__main__ import serve_rank

    name_process(f"mstar-rank{rank}")
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    become_rank(rank, command.world_size, command.epoch)
    code = serve_rank(command.args)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
