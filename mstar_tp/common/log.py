"""Logging, set up once a process, and ``span``, the one way to time a stretch of code.

Levels: INFO for the lifecycle, DEBUG for what each step does, WARNING when an operator should act.
A line about one request carries what the request is called (``about``). Lines hold no prompts, no
answers and no keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from mstar_tp.common import env

Form = Literal["text", "json"]

_spans = logging.getLogger("mstar_tp.spans")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The name of the request that this task or thread is busy with; "" for none."""

OTHERS = ("uvicorn", "asyncio", "opentelemetry")
"""Libraries whose warnings are written as our own lines are."""

_process = {"rank": "-", "role": "-", "seq": "-"}


def setup(role: str, rank: int | None = None, form: Form = "text") -> None:
    """Log to stderr under this process's prefix; again replaces role, rank and form only.

    ``role`` is frontend, leader or follower; ``rank`` is None outside the ranks.

    Raises:
        ConfigError: MSTAR_TP_LOG_LEVEL is no level.
    """
    _process["role"] = role
    _process["rank"] = "-" if rank is None else str(rank)
    root = logging.getLogger("mstar_tp")
    root.setLevel(env.log_level())
    handler = next((each for each in root.handlers if isinstance(each, _Handler)), None)
    if handler is None:
        handler = _Handler()
        root.addHandler(handler)
    handler.setFormatter(_JsonFormatter() if form == "json" else _Formatter())
    for logger in map(logging.getLogger, OTHERS):
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING)
        logger.propagate = False


def is_json() -> bool:
    """True if this process logs JSON."""
    handlers = logging.getLogger("mstar_tp").handlers
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in handlers)


def is_line(text: str) -> bool:
    """True if ``text`` is a line that a rank logged, in either form."""
    if text.startswith("{"):
        return '"role": "' in text and '"rank": "' in text
    return " rank=" in text and " role=" in text


def at_step(tp_seq: int) -> None:
    """Messages from now on carry ``seq=tp_seq``. Step thread."""
    _process["seq"] = str(tp_seq)


@contextlib.contextmanager
def about(name: str) -> Iterator[None]:
    """Messages of this thread or task within are about the request that is called ``name``."""
    token = request_id.set(name)
    try:
        yield
    finally:
        request_id.reset(token)


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


def _request_of(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "") or request_id.get())


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s%(process_fields)s%(request)s %(name)s: %(message)s"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.process_fields = "".join(
            f" {key}={value}" for key, value in _process.items() if value != "-"
        )
        name = _request_of(record)
        record.request = f" request={name}" if name else ""
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One object a line; ``extra={"fields": {…}}`` of a call adds members of its own."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in _process.items() if value != "-"}
        name = _request_of(record)
        if name:
            line["request_id"] = name
        fields = getattr(record, "fields", None)
        if fields:
            line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
