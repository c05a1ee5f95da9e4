"""The adapters that are checked, served or retiring.

Equal on every rank but for checks under way. Main thread (readers only add a finished check), under
the pool's lock. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.engine.resources.lora.adapters import Adapter, AdapterTable
from mstar_tp.lora.format.adapter_files import FileIdentity
from mstar_tp.lora.format.checkpoint import AdapterFile
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import AdapterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """The registration of a checked adapter: all that stays of the check until it is read.

    It is as little for a large file as for a small one. Ranks decide by ``lora_rank`` and
    ``targets``; the rest tells whether the folder still holds what was checked.
    """

    adapter: str
    path: str
    """The folder it was loaded from."""
    identity: tuple[FileIdentity, ...]
    fingerprint: bytes
    """Over its header and every setting that changes its delta."""
    lora_rank: int
    """The slot rank it needs."""
    targets: tuple[str, ...]
    """Names of the targets it changes, sorted."""
    biased: tuple[str, ...] = ()
    saved_ids: tuple[tuple[str, Sequence[int]], ...] = ()
    """Rows that its copy takes beside factors, as in ``AdapterFile``."""

    @classmethod
    def of(cls, file: AdapterFile, path: str) -> AdapterRecord:
        return cls(
            adapter=file.adapter,
            path=path,
            identity=file.identity,
            fingerprint=fingerprint(file),
            lora_rank=file.lora_rank,
            targets=_shared(file.targets),
            biased=_shared(file.biased),
            saved_ids=file.saved_ids,
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """The targets, biases and rows that it changes, in words; they give its copy's size."""
        biases = tuple(f"the bias of {target}" for target in self.biased)
        rows = tuple(
            f"{len(ids)} rows of {target} ({_hash(ids)})" for target, ids in self.saved_ids
        )
        return self.targets + biases + rows

    @property
    def decides(self) -> int:
        """A stable 62-bit hash of what ranks decide by."""
        text = f"{self.lora_rank} {' '.join(self.changes)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:8]


def fingerprint(file: AdapterFile) -> bytes:
    """The hash of all that a checked adapter is, but for its weights."""
    settings = [(m.name, m.lora_rank, m.scaling, m.swapped) for m in file.modules]
    norms = [norm.name for norm in file.norms]
    headers = [part.header_hash for part in file.files]
    return hashlib.sha256(f"{headers} {settings} {file.saved_ids} {norms}".encode()).digest()


_TARGETS: dict[tuple[str, ...], tuple[str, ...]] = {}
"""One tuple a set of targets, however many adapters have it; a model has few such sets."""


def _shared(targets: tuple[str, ...]) -> tuple[str, ...]:
    return _TARGETS.setdefault(targets, targets)


class AdapterRegistry:
    """The names that requests may use, and the loads that are not committed yet.

    Served adapters may be named by new requests; retiring ones only by requests that live. Both
    have their record in ``adapters``.
    """

    def __init__(self, adapters: AdapterTable) -> None:
        self._adapters = adapters
        self._loads: dict[AdapterKey, AdapterRecord | None] = {}
        """Announced loads: the check that passed, None while it is under way."""
        self._served: dict[str, tuple[AdapterKey, ...]] = {}
        """name -> the generations that requests may name, in the order they came: one, but while
        another takes its place."""
        self._pinned: dict[AdapterKey, None] = {}
        """Served adapters that are pinned, in the order they came: read at every reservation."""
        self._history = HistoryHash()

    def check(self, key: AdapterKey) -> None:
        """A load's header check is under way."""
        self._loads[key] = None

    def checked(self, key: AdapterKey, record: AdapterRecord | None) -> None:
        """The check is over: ``record`` when it passed. An aborted load leaves nothing."""
        if record is None:
            self._loads.pop(key, None)
        elif key in self._loads:
            self._loads[key] = record

    def abort(self, key: AdapterKey) -> None:
        """The load was refused somewhere: forget its check, also one still under way."""
        self._loads.pop(key, None)

    def commit(
        self,
        key: AdapterKey,
        path: str,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """Serve ``key`` from here on, beside ``replaces`` until that is retired; or why not.

        Raises:
            LockstepError: this rank never accepted the load, so it cannot have been committed.
        """
        record = self._loads.pop(key, None)
        served = self._served.get(key.name, ())
        if served and replaces not in served:
            return f"adapter {key.name!r} is served already, as {served[-1]}: unload it first"
        if record is None:
            raise LockstepError(f"adapter {key} ({path}) is committed, but was never accepted here")
        self._served[key.name] = (*served, key)
        self._adapters.add(Adapter(key, record, limits))
        self._note(1, key)
        if limits.pinned:
            self._pinned[key] = None
            self._note(4, key)
        return None

    def to_be_served(self, key: AdapterKey) -> AdapterRecord | None:
        """The check of a load that waits for its commit."""
        return self._loads.get(key)

    def pinned(self) -> list[AdapterKey]:
        """Return the served adapters that are pinned, in the order they came."""
        return list(self._pinned)

    def served(self, key: AdapterKey) -> bool:
        """Return whether a new request may name ``key``."""
        return key in self._served.get(key.name, ())

    def keys(self) -> list[AdapterKey]:
        """Every served adapter, in the order their names came."""
        return [key for keys in self._served.values() for key in keys]

    def retire(self, key: AdapterKey) -> bool:
        """No new request may name ``key``; whether it was served."""
        if not self.served(key):
            return False
        left = tuple(other for other in self._served[key.name] if other != key)
        if left:
            self._served[key.name] = left
        else:
            del self._served[key.name]
        self._pinned.pop(key, None)
        self._note(2, key)
        return True

    def retiring(self, key: AdapterKey) -> bool:
        """Return whether only requests that live may name ``key``."""
        return key in self._adapters and not self.served(key)

    def forget(self, key: AdapterKey) -> None:
        """The last request on a retired adapter has ended: its record goes."""
        if self._adapters.remove(key) is not None:
            self._note(3, key)

    def hash(self) -> int:
        """Running hash over what was served, retired and forgotten (R8)."""
        return self._history.value()

    def _note(self, change: int, key: AdapterKey) -> None:
        self._history.add(change)
        self._history.add_text(str(key))
