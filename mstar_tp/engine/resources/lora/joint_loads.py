"""Loads and unloads of adapters over all stages of a model: each pool takes its part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.registry.validation import JoinedValidation, OnValidated
from mstar_tp.lora.stage_specs import part_digest
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import AdapterKey

Done = Callable[[str | None, int, tuple[str, ...]], None]
"""Called once with why a load is refused, the slot rank it needs, and what it changes."""


class JointLoads:
    """The ``AdapterLoads`` of all pools as one. Threads and errors are those of each."""

    def __init__(self, pools: Sequence[LoraAdapterPool]) -> None:
        self._pools = pools

    def preload(
        self,
        configured: Sequence[tuple[AdapterKey, str]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        limits: Mapping[AdapterKey, AdapterLimits] | None = None,
    ) -> dict[str, int]:
        """Serve the configured adapters and begin the reads of the first.

        Returns by adapter (and stage) a hash of what its header says to decide by.

        Raises:
            AdapterError: naming every configured adapter that cannot be served, one a line.
        """
        found: dict[str, int] = {}
        for pool in self._pools:
            checked = pool.loads.preload(configured, progress, limits)
            found |= {_of_stage(name, pool): decides for name, decides in checked.items()}
        return found

    def begin(self, key: AdapterKey, path: str, done: Done) -> None:
        """Check a file's header on other threads; the last calls ``done(cause, rank, changes)``."""
        answers = _Answers(len(self._pools), done)
        for pool in self._pools:
            pool.loads.begin(key, path, answers.of(pool))

    def commit(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """Let requests name ``key`` from here on; return why it is not served after all, or None.

        That is so where ``replaces`` is served, too. With ``digest``, weights that hash otherwise
        are never served.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        why_not = (pool.loads.over_capacity(key, limits) for pool in self._pools)
        if (cause := next((why for why in why_not if why is not None), None)) is not None:
            self.abort(key)
            return cause
        causes = [
            pool.loads.commit(
                key,
                path,
                None if digest is None else part_digest(digest, pool.stage.name),
                replaces,
                limits,
            )
            for pool in self._pools
        ]
        return causes[0]

    def validate_adapter(self, name: str, path: str, done: OnValidated) -> None:
        """Validate a file whole on other threads; the last calls ``done``. Nothing is kept."""
        joined = JoinedValidation([pool.stage.name for pool in self._pools], done)
        for pool in self._pools:
            pool.loads.validate_adapter(name, path, joined.of(pool.stage.number))

    def limits(self, key: AdapterKey) -> AdapterLimits:
        """The limits of a served or retiring adapter, which every pool has. Main."""
        return self._pools[0].loads.limits(key)

    def abort(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``."""
        for pool in self._pools:
            pool.loads.abort(key)

    def unload(self, key: AdapterKey) -> bool:
        """Let no new request name ``key``; return whether it was served."""
        served = [pool.loads.unload(key) for pool in self._pools]
        return served[0]

    @property
    def any_to_forget(self) -> bool:
        """True when ``forget`` has something to forget."""
        return any(pool.loads.any_to_forget for pool in self._pools)

    def forget(self) -> None:
        """Forget the slots of what was unloaded. At the fence."""
        for pool in self._pools:
            pool.loads.forget()


class _Answers:
    """The answers of all pools to one load, joined. Any thread; the lock guards what came in."""

    def __init__(self, wanted: int, done: Done) -> None:
        self._missing = wanted
        self._done = done
        self._lock = threading.Lock()
        self._causes: list[str] = []
        self._ranks = [0]
        self._changes: dict[int, tuple[str, ...]] = {}

    def of(self, pool: LoraAdapterPool) -> Done:
        """The callback that takes the answer of ``pool``."""

        def take(cause: str | None, rank: int, changes: tuple[str, ...]) -> None:
            with self._lock:
                if cause is not None:
                    self._causes.append(cause)
                self._ranks.append(rank)
                named = tuple(_of_stage(change, pool) for change in changes)
                self._changes[pool.stage.number] = named
                self._missing -= 1
                if self._missing:
                    return
            if self._causes:
                self._done(self._causes[0], 0, ())
            else:
                in_order = (self._changes[number] for number in sorted(self._changes))
                self._done(None, max(self._ranks), tuple(c for part in in_order for c in part))

        return take


def _of_stage(text: str, pool: LoraAdapterPool) -> str:
    return f"{pool.stage.name}: {text}" if pool.stage.name else text
