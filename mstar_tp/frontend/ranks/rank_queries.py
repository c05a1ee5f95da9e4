"""What operators ask of every rank. The event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstar_tp.frontend.ranks.inspections import Inspections
from mstar_tp.wire.commands import ConductorMessage, Inspect, Locate, Validate
from mstar_tp.wire.reports import Validated
from mstar_tp.wire.states import Located, StateReport
from mstar_tp.wire.values import AdapterKey

Answer = StateReport | Located | Validated


class RankQueries:
    """Those that the ranks have not answered yet."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        world_size: int,
        check_serves: Callable[[], None],
    ) -> None:
        """``check_serves`` raises ApiError (503) while the ranks do not serve, or were told to
        stop: they answer no more.
        """
        self._check_serves = check_serves
        self._inspections = Inspections[StateReport](send, world_size)
        self._locations = Inspections[Located](send, world_size)
        self._validations = Inspections[Validated](send, world_size)

    async def inspect(self) -> list[StateReport]:
        """Every rank's tables, by rank, at one place in the order.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        return await self._inspections.ask(lambda number: Inspect(query_id=number))

    async def locate(self, keys: Sequence[AdapterKey]) -> list[Located]:
        """Where these adapters are, by rank, as soon as each can say it.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        adapters = tuple(keys)
        return await self._locations.ask(lambda number: Locate(query_id=number, adapters=adapters))

    async def validate(self, name: str, path: str) -> list[Validated]:
        """What each rank has to say of the adapter in ``path``, which none keeps.

        Raises:
            ApiError: 503, the ranks do not serve.
        """
        self._check_serves()
        return await self._validations.ask(
            lambda number: Validate(query_id=number, name=name, path=path)
        )

    def take(self, rank: int, answer: Answer) -> None:
        """One rank's; that which nobody waits for is dropped."""
        match answer:
            case StateReport():
                self._inspections.take(rank, answer)
            case Located():
                self._locations.take(rank, answer)
            case Validated():
                self._validations.take(rank, answer)

    def fail_all(self, message: str) -> None:
        """End every one with ``message``: its ranks answer no more."""
        for queries in (self._inspections, self._locations, self._validations):
            queries.fail_all(message)
