"""What a group of ranks is told once it is ready: the adapters and requests there were before it.

A group starts with the adapters of the configuration, or, started again, with none. Every other
adapter that is served, or that a live request names, is announced and checked as a load is. When
all are, one stream says the rest: commits, requests in their old order, unloads. Generations of a
name come one after another there, each before the requests that name it, as they did the first
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from mstar_tp.frontend.served import ServedAdapter
from mstar_tp.frontend.verdicts import Verdicts
from mstar_tp.wire.messages import (
    AdapterKey,
    ConductorMessage,
    Load,
    LoadAbort,
    LoadCommit,
    LoadResult,
    Unload,
)


class Restore:
    """One group's. ``settled`` once every adapter has its verdict."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        ids: itertools.count[int],
        world_size: int,
        begins_with: Iterable[AdapterKey],
    ) -> None:
        """``begins_with``: what the ranks serve already; ``ids``: of loads, never used twice."""
        self._send = send
        self._ids = ids
        self._world_size = world_size
        self._current = {key.name: key for key in begins_with}
        """name -> the generation that the ranks serve, as of what was sent."""
        self._checking: dict[int, tuple[AdapterKey, Verdicts]] = {}
        self._accepted: dict[AdapterKey, int] = {}
        self._committed: dict[int, AdapterKey] = {}
        self.refused: dict[AdapterKey, str] = {}
        """Adapters that are not there any more, and why."""

    @property
    def settled(self) -> bool:
        return not self._checking

    def announce(self, adapters: Iterable[ServedAdapter]) -> None:
        """Have the ranks check those they do not serve yet."""
        for adapter in adapters:
            key = adapter.key
            if self._current.get(key.name) != key:
                load_id = next(self._ids)
                self._checking[load_id] = (key, Verdicts(self._world_size))
                self._send(Load(load_id=load_id, key=key, path=adapter.path, digest=adapter.digest))

    def take_result(self, rank: int, result: LoadResult) -> bool:
        """One rank's verdict; False when the load is none of these."""
        if result.load_id not in self._checking:
            return False
        key, verdicts = self._checking[result.load_id]
        if verdicts.take(rank, result):
            del self._checking[result.load_id]
            cause = verdicts.refusal(key.name)
            if cause is None:
                self._accepted[key] = result.load_id
            else:
                self._send(LoadAbort(load_id=result.load_id))
                self.refused[key] = cause
        return True

    def take_done(self, load_id: int) -> AdapterKey | None:
        """The key whose commit the leader has applied, if it is one of these."""
        return self._committed.pop(load_id, None)

    def serve(self, key: AdapterKey) -> bool:
        """From here on the ranks serve ``key`` under its name; False when it was refused."""
        current = self._current.get(key.name)
        if current == key:
            return True
        load_id = self._accepted.pop(key, None)
        if load_id is None:
            return False
        if current is not None:
            self._send(Unload(key=current))
        self._send(LoadCommit(load_id=load_id))
        self._committed[load_id] = key
        self._current[key.name] = key
        return True

    def end(self, wanted: Iterable[AdapterKey]) -> None:
        """Leave the ranks with ``wanted``, as far as those were not refused, and nothing else."""
        keys = {key.name: key for key in wanted}
        for name, current in list(self._current.items()):
            if name not in keys or not self._may_serve(keys[name]):
                self._send(Unload(key=current))
                del self._current[name]
        for key in keys.values():
            self.serve(key)
        for load_id in self._accepted.values():
            self._send(LoadAbort(load_id=load_id))
        self._accepted.clear()

    def _may_serve(self, key: AdapterKey) -> bool:
        return key in self._accepted or self._current.get(key.name) == key
