"""Two machines on one: network namespaces with a cable between them.

Each has an address, processes, host name and temporary folder of its own, so that nothing but the
network leads from one to the other. Files are shared, as over NFS. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

INTERFACE = "eth0"
GUARD_S = 120.0


def _why_not() -> str | None:
    """The reason why this system has no machines to give."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [tool for tool in ("ip", "unshare", "pkill") if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} on PATH"
    name = f"mstar-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except RuntimeError as error:
        return f"this system allows no network namespaces: {error}"
    return None


class Machine:
    """One of them. Its processes end with it."""

    def __init__(self, name: str, space: str, address: str, scratch: Path, hosts: Path) -> None:
        self.name = name
        self.address = address
        self.scratch = scratch
        self.hosts = hosts
        self._space = space
        self.log = scratch / "log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` on this machine: its processes see only each other."""
        inside = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        script = f'hostname "$0" && mount --bind {self.hosts} /etc/hosts && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self._space,
            *inside,
            "bash",
            "-c",
            script,
            self.name,
            *words,
        ]

    def start(self, *words: str, cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Run ``words`` in the background; what they print goes to ``log``."""
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                self.command(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd,
                env={**os.environ, "TMPDIR": str(self.scratch), **env},
            )  # fmt: skip
        self._processes.append(process)
        return process

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(GUARD_S)


class Machines:
    """A group of ``count`` machines that know each other as ``node-0``, ``node-1`` and so on.

    This machine reaches them too.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = ExitStack()
        self.all: list[Machine] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            scratch = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="m-", dir="/tmp"))
            )
            hosts = scratch / "hosts"
            switch = f"mstar-{os.getpid()}-switch"
            _ip("netns", "add", switch)
            stack.callback(_ip, "netns", "del", switch)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            _ip("-n", switch, "link", "add", "port", "type", "veth",
                "peer", "name", f"mstar{os.getpid()}", "netns", str(os.getpid()))  # fmt: skip
            _ip("-n", switch, "link", "set", "port", "master", "switch", "up")
            _ip("addr", "add", "10.77.0.254/24", "dev", f"mstar{os.getpid()}")
            _ip("link", "set", f"mstar{os.getpid()}", "up")
            for number in range(self._count):
                name, address = f"node-{number}", f"10.77.0.{number + 1}"
                space = f"mstar-{os.getpid()}-{number}"
                _ip("netns", "add", space)
                stack.callback(_ip, "netns", "del", space)
                port = f"port{number}"
                _ip("-n", switch, "link", "add", port, "type", "veth",
                    "peer", "name", INTERFACE, "netns", space)  # fmt: skip
                _ip("-n", switch, "link", "set", port, "master", "switch", "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
                _ip("-n", space, "link", "set", INTERFACE, "up")
                _ip("-n", space, "link", "set", "lo", "up")
                folder = scratch / str(number)
                folder.mkdir()
                machine = Machine(name, space, address, folder, hosts)
                stack.callback(machine.end)
                self.all.append(machine)
            names = [f"{machine.address} {machine.name}\n" for machine in self.all]
            hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


_reason = _why_not()
needs_machines = pytest.mark.skipif(_reason is not None, reason=_reason or "")
