"""``mstar-tp serve`` as a user starts it: a process, real sockets, stopped by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mstar_tp.common.errors import MstarError

_SERVING = re.compile(r"^Serving .* on (http://\S+)$")


class Server:
    """Started on entry (``url`` is where it listens), stopped by SIGTERM on exit.

    Raises:
        MstarError: on entry, when the server does not come up; what it printed.
    """

    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        """Start ``mstar-tp serve`` with ``args``.

        A free port is chosen unless one is given. ``env`` is added to the environment.
        """
        port = () if "--port" in args else ("--port", "0")
        self.command: Sequence[str] = (
            *(sys.executable, "-m", "mstar_tp", "serve"),
            *args,
            *port,
        )
        self.environ = {**os.environ, **(env or {})}
        self.url = ""
        self.process: subprocess.Popen[str]
        self._log = tempfile.NamedTemporaryFile(prefix="mstar-serve-", suffix=".log")

    @property
    def log(self) -> str:
        """The server's stderr so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self.environ,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            serving = _SERVING.match(line.strip())
            if serving is not None:
                self.url = serving[1]
                return self
        self.process.wait()
        raise MstarError(f"the server did not start:\n{''.join(lines)}{self.log}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode
