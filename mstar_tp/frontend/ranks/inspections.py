"""Asking every rank one thing and waiting for all answers. The event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mstar_tp.frontend.api.api_errors import unavailable
from mstar_tp.wire.commands import ConductorMessage


class Report(Protocol):
    """A rank's answer, with the number of the question."""

    @property
    def query_id(self) -> int: ...


R = TypeVar("R", bound=Report)


class Inspections(Generic[R]):
    """Questions of one kind that were asked and not answered by every rank yet."""

    def __init__(self, send: Callable[[ConductorMessage], None], world_size: int) -> None:
        self._send = send
        self._ids = itertools.count()
        self._world_size = world_size
        self._told: dict[int, dict[int, R]] = {}
        self._answers: dict[int, asyncio.Future[list[R]]] = {}

    async def ask(self, question: Callable[[int], ConductorMessage]) -> list[R]:
        """Every rank's answer to the question that has this number, by rank.

        Raises:
            ApiError: 503, the ranks went away meanwhile.
        """
        query_id = next(self._ids)
        future: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        # First: a question that cannot be asked must not be waited for.
        self._send(question(query_id))
        self._told[query_id] = {}
        self._answers[query_id] = future
        return await future

    def take(self, rank: int, report: R) -> None:
        """One rank's answer; that of one which nobody waits for is dropped."""
        told = self._told.get(report.query_id)
        if told is None:
            return
        told[rank] = report
        if len(told) == self._world_size:
            del self._told[report.query_id]
            future = self._answers.pop(report.query_id)
            if not future.done():
                future.set_result([told[one] for one in sorted(told)])

    def fail_all(self, message: str) -> None:
        """End every one with ``message``: its ranks answer no more."""
        answers, self._answers, self._told = self._answers, {}, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(unavailable(message))
