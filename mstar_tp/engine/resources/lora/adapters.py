"""One record for each adapter that is served, or unloaded with requests still running.

State that decisions depend on in order (recency, slots, served names, the ranks' reports) is kept
in tables of its own: ``cpu_cache/membership.py``, ``slots.py``, ``registry/registry.py`` and
``rank_copies.py``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:  # these modules import this one
    from mstar_tp.engine.resources.lora.cpu_cache.reads import Read
    from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
    from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter whose load every rank accepted, until the last request on it has ended."""

    key: AdapterKey
    registration: AdapterRecord
    """The result of its check; a read fails if the file no longer matches it."""
    limits: AdapterLimits = NO_LIMITS
    """Its scheduling weight, its limits of requests, and whether it is pinned."""
    cost: int = 1
    """Its cost in the CPU cache: 1, or bytes, as capacity is configured; equal on all ranks."""
    has_part: bool = True
    """True when it has weights for this stage of the model."""
    read: Read | None = None
    """The read of its current fetch, finished or not; None while it is not cached."""
    copy: LoadedAdapter | None = None
    """This rank's shard; None until the read completes."""
    agreed_digest: str | None = None
    """The digest that all ranks agreed on when it was first copied into a slot."""
    hits: int = 0
    """Rows that found it in a slot. Statistics only, like the two below."""
    installs: int = 0
    """Times that it was put into a slot."""
    evictions: int = 0
    """Times that another took its slot."""


class AdapterTable:
    """Every record, in the order of loads. Any access is under ``PoolTables.lock``."""

    def __init__(self) -> None:
        self._adapters: dict[AdapterKey, Adapter] = {}

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._adapters

    def __getitem__(self, key: AdapterKey) -> Adapter:
        return self._adapters[key]

    def get(self, key: AdapterKey) -> Adapter | None:
        """Return the record, also of an unloaded adapter with requests still running, or None."""
        return self._adapters.get(key)

    def add(self, adapter: Adapter) -> None:
        """Add a record; the key must be new."""
        assert adapter.key not in self._adapters, f"{adapter.key} has a record already"
        self._adapters[adapter.key] = adapter

    def remove(self, key: AdapterKey) -> Adapter | None:
        """Remove and return the record, or None when there was none."""
        return self._adapters.pop(key, None)
