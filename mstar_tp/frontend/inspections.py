"""Asking every rank for its tables, at one place in the order. The event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from mstar_tp.frontend.errors import unavailable
from mstar_tp.wire.messages import Inspect, StateReport


class Inspections:
    """Those that were asked for and not answered by every rank yet."""

    def __init__(self, send: Callable[[Inspect], None], world_size: int) -> None:
        self._send = send
        self._ids = itertools.count()
        self._world_size = world_size
        self._told: dict[int, dict[int, StateReport]] = {}
        self._answers: dict[int, asyncio.Future[list[StateReport]]] = {}

    async def ask(self) -> list[StateReport]:
        """Every rank's tables, by rank.

        Raises:
            ApiError: 503, the ranks went away meanwhile.
        """
        query_id = next(self._ids)
        future: asyncio.Future[list[StateReport]] = asyncio.get_running_loop().create_future()
        self._told[query_id] = {}
        self._answers[query_id] = future
        self._send(Inspect(query_id=query_id))
        return await future

    def take(self, rank: int, report: StateReport) -> None:
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
