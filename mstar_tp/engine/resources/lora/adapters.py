"""The one record of each adapter that a rank serves or still runs requests on. No torch.

Ordered facts that decisions go by (recency, slots, served names, what the ranks reported) are
indices beside it, in ``membership``, ``slots``, ``registry`` and ``rank_copies``.
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
    """A committed adapter, from its commit until the last request on it has ended."""

    key: AdapterKey
    registration: AdapterRecord
    """The result of its check: what a read must find again."""
    limits: AdapterLimits = NO_LIMITS
    """The shares and bounds that it was given."""
    cost: int = 1
    """Units of the CPU cache that its copy takes; equal on every rank."""
    has_part: bool = True
    """True when it changes this stage."""
    read: Read | None = None
    """The read of its present fetch, settled or not; None while the CPU cache does not hold it."""
    copy: LoadedAdapter | None = None
    """The shard of its present fetch, once it is in."""
    agreed_digest: str | None = None
    """The digest that every rank agreed on at its first install."""
    hits: int = 0
    """Times that a row found it in a slot; this and the next two decide nothing."""
    installs: int = 0
    """Times that it was put into a slot."""
    evictions: int = 0
    """Times that another took its slot."""


class AdapterTable:
    """Every record, in the order of commits. Main thread, under the pool's lock."""

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
        """The record of a served or retiring adapter, or None."""
        return self._adapters.get(key)

    def add(self, adapter: Adapter) -> None:
        """Begin a record; its key has none."""
        assert adapter.key not in self._adapters, f"{adapter.key} has a record already"
        self._adapters[adapter.key] = adapter

    def remove(self, key: AdapterKey) -> Adapter | None:
        """End a record, all of it; return it, or None when there was none."""
        return self._adapters.pop(key, None)
