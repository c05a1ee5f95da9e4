"""Which adapters are known: checked, served, retiring. Equal on every rank but for checks under
way.

Main thread (readers only add a finished check), under the pool's lock. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.lora.format.adapter_files import FileIdentity
from mstar_tp.lora.format.checkpoint import AdapterFile
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import AdapterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """What stays of a checked adapter until it is read: as little for a large file as for a small
    one. Ranks decide by ``rank`` and ``targets``; the rest tells whether the folder still holds
    what was checked.
    """

    adapter: str
    path: str
    """The folder it was loaded from."""
    identity: tuple[FileIdentity, ...]
    fingerprint: bytes
    """Over its header and every setting that changes its delta."""
    rank: int
    """The slot rank it needs."""
    targets: tuple[str, ...]
    """Names of the targets it changes, sorted."""
    biased: tuple[str, ...] = ()
    saved_ids: tuple[tuple[str, Sequence[int]], ...] = ()
    """As in ``AdapterFile``: what its copy takes beside factors."""

    @classmethod
    def of(cls, file: AdapterFile, path: str) -> AdapterRecord:
        return cls(
            adapter=file.adapter,
            path=path,
            identity=file.identity,
            fingerprint=fingerprint(file),
            rank=file.rank,
            targets=_shared(file.targets),
            biased=_shared(file.biased),
            saved_ids=file.saved_ids,
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """Return what it changes, in words: all that its copy's size follows from."""
        biases = tuple(f"the bias of {target}" for target in self.biased)
        rows = tuple(
            f"{len(ids)} rows of {target} ({_hash(ids)})" for target, ids in self.saved_ids
        )
        return self.targets + biases + rows

    @property
    def decides(self) -> int:
        """A stable 62-bit hash of what ranks decide by."""
        text = f"{self.rank} {' '.join(self.changes)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:8]


def fingerprint(file: AdapterFile) -> bytes:
    """Return what a checked adapter is, but for its weights."""
    settings = [(m.name, m.rank, m.scaling, m.swapped) for m in file.modules]
    norms = [norm.name for norm in file.norms]
    headers = [part.header_hash for part in file.files]
    return hashlib.sha256(f"{headers} {settings} {file.saved_ids} {norms}".encode()).digest()


_TARGETS: dict[tuple[str, ...], tuple[str, ...]] = {}
"""One tuple a set of targets, however many adapters have it; a model has few such sets."""


def _shared(targets: tuple[str, ...]) -> tuple[str, ...]:
    return _TARGETS.setdefault(targets, targets)


class AdapterRegistry:
    """Checked files wait for their commit; served ones may be named by new requests; retiring ones
    only by requests that live.
    """

    def __init__(self) -> None:
        self._checking: set[AdapterKey] = set()
        self._checked: dict[AdapterKey, AdapterRecord] = {}
        self._served: dict[str, tuple[AdapterKey, ...]] = {}
        """name -> the generations that requests may name, in the order they came: one, but while
        another takes its place."""
        self._records: dict[AdapterKey, AdapterRecord] = {}
        self._limits: dict[AdapterKey, AdapterLimits] = {}
        """Of those that were given any."""
        self._history = HistoryHash()

    def check(self, key: AdapterKey) -> None:
        """A load's header check is under way."""
        self._checking.add(key)

    def checked(self, key: AdapterKey, record: AdapterRecord | None) -> None:
        """The check is over: ``record`` when it passed.

        One that was aborted meanwhile leaves nothing.
        """
        if key in self._checking and record is not None:
            self._checked[key] = record
        self._checking.discard(key)

    def abort(self, key: AdapterKey) -> None:
        """The load was refused somewhere: forget its check, also one still under way."""
        self._checking.discard(key)
        self._checked.pop(key, None)

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
        record = self._checked.pop(key, None)
        served = self._served.get(key.name, ())
        if served and replaces not in served:
            return f"adapter {key.name!r} is served already, as {served[-1]}: unload it first"
        if record is None:
            raise LockstepError(f"adapter {key} ({path}) is committed, but was never accepted here")
        self._served[key.name] = (*served, key)
        self._records[key] = record
        self._note(1, key)
        if limits != NO_LIMITS:
            self._limits[key] = limits
        if limits.pinned:
            self._note(4, key)
        return None

    def to_be_served(self, key: AdapterKey) -> AdapterRecord | None:
        """Return what was checked and waits for its commit."""
        return self._checked.get(key)

    def limits(self, key: AdapterKey) -> AdapterLimits:
        """Return what a served or retiring adapter may take."""
        return self._limits.get(key, NO_LIMITS)

    def pinned(self) -> list[AdapterKey]:
        """Served adapters that are pinned, in the order they came."""
        return [k for k, limits in self._limits.items() if limits.pinned and self.served(k)]

    @property
    def num_known(self) -> int:
        """Served and retiring adapters."""
        return len(self._records)

    def known(self) -> list[AdapterKey]:
        """Served and retiring adapters."""
        return list(self._records)

    def record(self, key: AdapterKey) -> AdapterRecord | None:
        """Return what is known of a served or retiring adapter."""
        return self._records.get(key)

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
        self._note(2, key)
        return True

    def retiring(self, key: AdapterKey) -> bool:
        return key in self._records and not self.served(key)

    def forget(self, key: AdapterKey) -> None:
        """The last request on a retired adapter has ended."""
        self._limits.pop(key, None)
        if self._records.pop(key, None) is not None:
            self._note(3, key)

    def hash(self) -> int:
        """Running hash over what was served, retired and forgotten (R8)."""
        return self._history.value()

    def _note(self, change: int, key: AdapterKey) -> None:
        self._history.add(change)
        self._history.add_text(str(key))
