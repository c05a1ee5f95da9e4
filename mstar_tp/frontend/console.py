"""The console output of a server that starts, serves and stops."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.markup import escape
from rich.status import Status

logger = logging.getLogger(__name__)


class ServerConsole:
    """The output: steps to stdout, logs and progress to stderr, as one live line on a terminal."""

    def __init__(self, *, as_logs: bool = False) -> None:
        """``as_logs``: everything that goes to stderr is a line of the log."""
        self._as_logs = as_logs
        self._out = Console(highlight=False, soft_wrap=True)
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def say(self, text: str) -> None:
        """Print a step of the server's life."""
        self._end_status()
        self._out.print(escape(text))
        self._out.file.flush()

    def log(self, line: str) -> None:
        """Print a line that a rank logged, as it is, or the error that ends the server."""
        if self._as_logs and not line.startswith("{"):
            logger.error("%s", line.removeprefix("error: "))
        else:
            self._console.print(line, markup=False)

    def progress(self, rank: int, text: str) -> None:
        """Show the progress of a rank that starts."""
        line = f"rank {rank}: {text}"
        if self._as_logs:
            logger.info("%s", line)
            return
        if not self._console.is_terminal:
            self._console.print(line, markup=False)
            return
        if self._status is None:
            self._status = self._console.status(escape(line))
            self._status.start()
        self._status.update(escape(line))

    def close(self) -> None:
        """End the live line."""
        self._end_status()

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
