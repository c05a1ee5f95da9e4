"""The restore tells a group of ranks that is ready of the adapters and requests before it.

A group starts with the adapters of the configuration, or, started again, with none. Every other
adapter that is served, or that a live request names, is announced and validated as a load is. When
all are, one stream says the rest: commits, requests in their old order, unloads. Generations of a
name come one after another there, each before the requests that name it; adapters that nobody may
name any more are unloaded behind the last of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from mstar_tp.frontend.adapters.rank_validations import RankValidations
from mstar_tp.frontend.adapters.served_models import ServedAdapter
from mstar_tp.wire.commands import ConductorMessage, Load, LoadAbort, LoadCommit, Unload
from mstar_tp.wire.reports import LoadResult
from mstar_tp.wire.values import AdapterKey


class Restore:
    """The restore of one group, ``settled`` once every rank has validated every adapter."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        ids: itertools.count[int],
        world_size: int,
        begins_with: Iterable[AdapterKey],
    ) -> None:
        """``begins_with``: the adapters that ranks serve already; ``ids``: fresh load numbers."""
        self._send = send
        self._ids = ids
        self._world_size = world_size
        self._serving = dict.fromkeys(begins_with)
        """The adapters that the ranks serve, as of what was sent; a name may have generations."""
        self._checking: dict[int, tuple[AdapterKey, RankValidations]] = {}
        self._accepted: dict[AdapterKey, int] = {}
        self._committed: dict[int, AdapterKey] = {}
        self.refused: dict[AdapterKey, str] = {}
        """The adapters that are not there any more, and why."""

    @property
    def settled(self) -> bool:
        return not self._checking

    def announce(self, adapters: Iterable[ServedAdapter]) -> None:
        """Have the ranks validate the adapters that they do not serve yet."""
        for adapter in adapters:
            key = adapter.key
            if key not in self._serving:
                load_id = next(self._ids)
                self._checking[load_id] = (key, RankValidations(self._world_size))
                self._send(
                    Load(
                        load_id=load_id,
                        key=key,
                        path=adapter.path,
                        digest=adapter.digest,
                        limits=adapter.limits,
                    )
                )

    def take_result(self, rank: int, result: LoadResult) -> bool:
        """Take one rank's validation; False when the load is none of these."""
        if result.load_id not in self._checking:
            return False
        key, validations = self._checking[result.load_id]
        if validations.take(rank, result):
            del self._checking[result.load_id]
            cause = validations.refusal(key.name)
            if cause is None:
                self._accepted[key] = result.load_id
            else:
                self._send(LoadAbort(load_id=result.load_id))
                self.refused[key] = cause
        return True

    def take_done(self, load_id: int) -> AdapterKey | None:
        """Return the key whose commit the leader has applied, if it is one of these."""
        return self._committed.pop(load_id, None)

    def serve(self, key: AdapterKey) -> bool:
        """Let requests name ``key`` from here on; False when it was refused.

        Other generations of its name stay beside it.
        """
        if key in self._serving:
            return True
        load_id = self._accepted.pop(key, None)
        if load_id is None:
            return False
        beside = next((other for other in self._serving if other.name == key.name), None)
        self._send(LoadCommit(load_id=load_id, replaces=beside))
        self._committed[load_id] = key
        self._serving[key] = None
        return True

    def end(self, wanted: Iterable[AdapterKey]) -> None:
        """Leave the ranks with ``wanted``, as far as those were not refused, and nothing else."""
        keys = dict.fromkeys(wanted)
        for key in keys:
            self.serve(key)
        for key in [key for key in self._serving if key not in keys]:
            self._send(Unload(key=key))
            del self._serving[key]
        for load_id in self._accepted.values():
            self._send(LoadAbort(load_id=load_id))
        self._accepted.clear()
