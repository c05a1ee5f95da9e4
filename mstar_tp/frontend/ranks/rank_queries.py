"""Queries that operators make of every rank. The event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from mstar_tp.frontend.api.api_errors import unavailable
from mstar_tp.wire.commands import ConductorMessage, Inspect, Locate, Validate
from mstar_tp.wire.reports import Validated
from mstar_tp.wire.states import Located, StateReport
from mstar_tp.wire.values import AdapterKey

Answer = StateReport | Located | Validated


class RankQueries:
    """The queries that not every rank has answered yet."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        world_size: int,
        check_serves: Callable[[], None],
    ) -> None:
        """``check_serves`` raises ApiError (503) while ranks do not serve, or were told to stop."""
        self._check_serves = check_serves
        self._inspections = _Queries[StateReport](send, world_size)
        self._locations = _Queries[Located](send, world_size)
        self._validations = _Queries[Validated](send, world_size)

    async def inspect(self) -> list[StateReport]:
        """Return every rank's tables, by rank, at one place in the schedule.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        return await self._inspections.ask(lambda number: Inspect(query_id=number))

    async def locate(self, keys: Sequence[AdapterKey]) -> list[Located]:
        """Return where these adapters are, by rank, as soon as each rank can say it.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        adapters = tuple(keys)
        return await self._locations.ask(lambda number: Locate(query_id=number, adapters=adapters))

    async def validate(self, name: str, path: str) -> list[Validated]:
        """Return what each rank finds in the adapter at ``path``; no rank keeps it.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        return await self._validations.ask(
            lambda number: Validate(query_id=number, name=name, path=path)
        )

    def take(self, rank: int, answer: Answer) -> None:
        """Take one rank's answer; an answer that nobody waits for is dropped."""
        match answer:
            case StateReport():
                self._inspections.take(rank, answer)
            case Located():
                self._locations.take(rank, answer)
            case Validated():
                self._validations.take(rank, answer)

    def fail_all(self, message: str) -> None:
        """End every query with ``message``: its ranks answer no more."""
        for queries in (self._inspections, self._locations, self._validations):
            queries.fail_all(message)


class _Report(Protocol):
    """A rank's answer, with the number of its query."""

    @property
    def query_id(self) -> int: ...


R = TypeVar("R", bound=_Report)


class _Queries(Generic[R]):
    """The queries of one kind, with the answers that have come."""

    def __init__(self, send: Callable[[ConductorMessage], None], world_size: int) -> None:
        self._send = send
        self._ids = itertools.count()
        self._world_size = world_size
        self._told: dict[int, dict[int, R]] = {}
        self._answers: dict[int, asyncio.Future[list[R]]] = {}

    async def ask(self, query: Callable[[int], ConductorMessage]) -> list[R]:
        """Return every rank's answer, by rank, to the query that is made with a fresh number.

        Raises:
            ApiError: 503, the ranks went away meanwhile.
        """
        query_id = next(self._ids)
        future: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        # First: a query that cannot be sent must not be waited for.
        self._send(query(query_id))
        self._told[query_id] = {}
        self._answers[query_id] = future
        return await future

    def take(self, rank: int, report: R) -> None:
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
        answers, self._answers, self._told = self._answers, {}, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(unavailable(message))
