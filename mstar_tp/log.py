"""Logging, set up once a process, and ``span``, the one way to time a stretch of code.

Levels: INFO for the lifecycle, DEBUG for what each step does, WARNING when an operator should act.
"""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from types import TracebackType

from mstar_tp import env

_spans = logging.getLogger("mstar_tp.spans")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""What the request is called that this task or thread is busy with; "" for none."""

_process = {"rank": "-", "role": "-", "seq": "-"}


def setup(role: str, rank: int | None = None) -> None:
    """Log to stderr under this process's prefix; again replaces role and rank only.

    ``role`` is frontend, leader or follower; ``rank`` is None outside the ranks.

    Raises:
        ConfigError: MSTAR_TP_LOG_LEVEL is no level.
    """
    _process["role"] = role
    _process["rank"] = "-" if rank is None else str(rank)
    root = logging.getLogger("mstar_tp")
    root.setLevel(env.log_level())
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        root.addHandler(_Handler())


def at_step(tp_seq: int) -> None:
    """Messages from now on carry ``seq=tp_seq``. Step thread."""
    _process["seq"] = str(tp_seq)


class span:  # noqa: N801 - used as a statement: with span("forward"):
    """Time a block: a DEBUG line with its milliseconds. Costs next to nothing when DEBUG is off."""

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _spans.isEnabledFor(logging.DEBUG):
            _spans.debug("%s took %.3f ms", self._name, (time.perf_counter() - self._start) * 1e3)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the stderr of the moment, with the process's prefix."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s rank=%(rank)s role=%(role)s seq=%(seq)s "
            "%(name)s: %(message)s"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.__dict__.update(_process)
        return super().format(record)
