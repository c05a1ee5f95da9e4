"""Loading and unloading adapters while the instance serves. The event loop's thread.

A load is announced to every rank, validated by each, and committed only when all accepted it; one
refusal takes it back everywhere. The answer waits until the leader has applied the commit in its
schedule, so a client that is told "loaded" can use the name at once. An unload takes the name away
at once; requests that were resolved before run to their end.

While the ranks are down, loads wait, and are announced to the next ranks; so are loads whose
outcome the old ranks took with them. Unloads need no waiting: the next ranks never hear the name.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from mstar_tp.config.limits import LimitsConfig
from mstar_tp.frontend.adapters.rank_validations import RankValidations
from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.api_errors import ApiError, bad_request, printable, unavailable
from mstar_tp.wire.adapter_limits import AdapterLimits
from mstar_tp.wire.commands import ConductorMessage, Load, LoadAbort, LoadCommit, Unload
from mstar_tp.wire.reports import LoadResult
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)

NOTHING_GIVEN = LimitsConfig()


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A load in flight; its future ends with the leader's LoadDone, or the error."""

    key: AdapterKey
    path: str
    on_demand: bool
    limits: AdapterLimits
    validations: RankValidations
    """The validations of the present ranks."""
    outcome: asyncio.Future[ApiError | None]


class AdapterLoads:
    """The loads in flight, and the unloads that wait for requests still being prepared."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        served: ServedModels,
        *,
        world_size: int,
        max_pending: int,
        named: Callable[[AdapterKey], bool],
        up: Callable[[], bool],
        state: StateFile,
    ) -> None:
        """``max_pending``: the loads in flight at once; further ones are answered 503.

        ``named`` says whether a live request names an adapter; ``up``, whether ranks serve that
        are told of loads and unloads as they come.
        """
        self._send = send
        self._served = served
        self._world_size = world_size
        self._max_pending = max_pending
        self._named = named
        self._state = state
        self._up = up
        self.ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._by_name: dict[str, _Pending] = {}
        self._retained: Counter[AdapterKey] = Counter()
        """adapter -> the number of requests on it that are being prepared."""
        self._late_unloads: dict[AdapterKey, asyncio.Future[ApiError | None]] = {}
        """The unloads that ranks are told of once no request on the adapter is being prepared."""
        self._failed_all: list[str] = []
        """The message of each ``fail_all`` so far: those who waited meanwhile end with it too."""

    # ------------------------------------------------------------------ load

    async def load(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        on_demand: bool = False,
        limits: LimitsConfig = NOTHING_GIVEN,
    ) -> None:
        """Serve the adapter in ``path`` as ``name``; return once the leader has it in its schedule.

        ``in_place``: also where the name is served. Requests from then on get the new weights, and
        earlier ones run to their end on the old. Until then, and when the new ones are refused, the
        old are served. ``on_demand``: a request asks for it; an adapter that an operator serves as
        ``name`` meanwhile stays. ``limits``: fields left open stay as they are now, or as the
        configuration has them.

        Of several at once for one name, one loads and the others share its outcome. A load waits
        until the ranks have been told of the name's last unload: they would find it served still.

        Raises:
            ApiError: it is served already, or refused (by which rank, and why), or too many loads
                are in flight, or the ranks are gone.
        """
        before = len(self._failed_all)
        while True:
            if (other := self._by_name.get(name)) is not None:
                failure = await asyncio.shield(other.outcome)
                shared = other.path == path
            elif (unload := self._waiting_unload(name)) is not None:
                failure = await asyncio.shield(unload)
                shared = True
            else:
                break
            if len(self._failed_all) > before:
                # The group this load was meant for has ended, whatever came of the other one.
                raise unavailable(self._failed_all[before])
            if failure is not None and shared:
                raise failure
        there = self._served.get(name)
        if there is not None and on_demand and not there.on_demand:
            return
        if there is not None and not in_place:
            raise bad_request(
                f"lora_name: '{printable(name)}' has already been loaded: unload it first, or say "
                "load_inplace",
                param="lora_name",
                code="adapter_already_loaded",
            )
        if len(self._pending) >= self._max_pending:
            raise unavailable(
                f"{len(self._pending)} adapters are being loaded, the most at once: try again "
                "later",
                code="queue_full",
            )
        pending = self._announce(name, path, on_demand, self._limits(name, limits))
        # Shielded: a client that leaves does not leave the ranks half way.
        failure = await asyncio.shield(pending.outcome)
        if failure is not None:
            raise failure

    def _limits(self, name: str, given: LimitsConfig) -> AdapterLimits:
        served = self._served.get(name)
        known = self._served.configured_limits(name) if served is None else served.limits
        wanted = {key: value for key, value in given if value is not None}
        return msgspec.structs.replace(known, **wanted)

    def _announce(self, name: str, path: str, on_demand: bool, limits: AdapterLimits) -> _Pending:
        load_id = next(self.ids)
        key = self._served.next_key(name)
        outcome: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        validations = RankValidations(self._world_size)
        pending = _Pending(
            key=key,
            path=path,
            on_demand=on_demand,
            limits=limits,
            validations=validations,
            outcome=outcome,
        )
        # First: what cannot be said to the ranks must not be waited for.
        self._tell(Load(load_id=load_id, key=key, path=path, limits=limits))
        self._pending[load_id] = pending
        self._by_name[name] = pending
        return pending

    def take_result(self, rank: int, result: LoadResult) -> None:
        """Take one rank's validation; the last one settles the load."""
        pending = self._pending.get(result.load_id)
        if pending is None or not pending.validations.take(rank, result):
            return
        cause = pending.validations.refusal(pending.key.name)
        if cause is None:
            replaces = self._served_by_ranks(pending.key.name)
            self._tell(LoadCommit(load_id=result.load_id, replaces=replaces))
        else:
            self._tell(LoadAbort(load_id=result.load_id))
            refusal = bad_request(cause, param="lora_path", code="adapter_refused")
            self._settle(result.load_id, refusal)

    def take_done(self, load_id: int, cause: str | None) -> None:
        """Settle a load whose commit the leader applied at its place in the schedule."""
        if load_id not in self._pending:
            return
        param = "pinned" if cause is not None and cause.startswith("pinned: ") else "lora_name"
        self._settle(load_id, None if cause is None else bad_request(cause, param=param))

    def _settle(self, load_id: int, failure: ApiError | None) -> None:
        pending = self._pending.pop(load_id)
        del self._by_name[pending.key.name]
        if failure is None:
            old = self._served.get(pending.key.name)
            self._served.add(
                pending.key, pending.path, on_demand=pending.on_demand, limits=pending.limits
            )
            self._state.changed(self._served)
            logger.info("loaded adapter %s from %s", pending.key, pending.path)
            if old is not None:
                self._retire(old.key)
        pending.outcome.set_result(failure)

    # ------------------------------------------------------------------ unload

    def unload(self, name: str) -> None:
        """Serve ``name`` to no new request, from now on.

        Raises:
            ApiError: 404, no such adapter is served.
        """
        if self._served.get(name) is None:
            raise ApiError(
                404,
                f"lora_name: no adapter '{printable(name)}' is loaded",
                param="lora_name",
                code="adapter_not_found",
            )
        key = self._served.remove(name)
        self._state.changed(self._served)
        logger.info("unloaded adapter %s", key)
        self._retire(key)

    def _retire(self, key: AdapterKey) -> None:
        """Tell the ranks that no new request names ``key``, once that is so."""
        if self._retained[key]:
            self._late_unloads[key] = asyncio.get_running_loop().create_future()
        else:
            self._tell(Unload(key=key))
            self._forget_unless_named(key)

    def retain(self, key: AdapterKey) -> None:
        """Do not tell the ranks that ``key`` is gone while a request on it is being prepared.

        The request reaches them first.
        """
        self._retained[key] += 1

    def release(self, key: AdapterKey) -> None:
        """End one ``retain``; the last one's end tells the ranks of an unload that waits for it."""
        self._retained[key] -= 1
        if not self._retained[key]:
            del self._retained[key]
            if (unload := self._late_unloads.pop(key, None)) is not None:
                self._tell(Unload(key=key))
                unload.set_result(None)
            self._forget_unless_named(key)

    def _waiting_unload(self, name: str) -> asyncio.Future[ApiError | None] | None:
        waiting = self._late_unloads.items()
        return next((unload for key, unload in waiting if key.name == name), None)

    def _served_by_ranks(self, name: str) -> AdapterKey | None:
        """Return the adapter that ranks serve as ``name``; they were not told of late unloads."""
        served = self._served.get(name)
        if served is not None:
            return served.key
        return next((key for key in self._late_unloads if key.name == name), None)

    # ------------------------------------------------------------------ the ranks come and go

    def in_use(self, key: AdapterKey) -> bool:
        """Return whether a request names ``key``: a live one, or one that is being prepared."""
        return self._retained[key] > 0 or self._named(key)

    def wanted(self) -> list[AdapterKey]:
        """Return the adapters that ranks are to serve: also those whose unload waits."""
        return [*self._late_unloads, *(adapter.key for adapter in self._served.adapters())]

    def ranks_left(self) -> None:
        """Begin the validations of loads in flight anew: the next ranks answer them."""
        for pending in self._pending.values():
            pending.validations = RankValidations(self._world_size)

    def ranks_came(self) -> None:
        """Tell new ranks, which serve what ``wanted`` said, of the loads that wait."""
        for load_id, pending in self._pending.items():
            self._tell(
                Load(load_id=load_id, key=pending.key, path=pending.path, limits=pending.limits)
            )

    def fail_all(self, message: str) -> None:
        """End every load with ``message``, waiting ones too, and forget the late unloads."""
        self._failed_all.append(message)
        for load_id in list(self._pending):
            self._settle(load_id, unavailable(message))
        unloads, self._late_unloads = self._late_unloads, {}
        for unload in unloads.values():
            unload.set_result(unavailable(message))

    def _tell(self, message: ConductorMessage) -> None:
        if self._up():
            self._send(message)

    def _forget_unless_named(self, key: AdapterKey) -> None:
        """Forget an unloaded adapter that no request names: no ranks will be asked to serve it."""
        if not self.in_use(key):
            self._served.forget(key)
