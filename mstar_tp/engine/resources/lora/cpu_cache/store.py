"""The CPU cache: adapters in host memory, read and sharded for this rank.

``membership`` decides what it holds. ``read`` does I/O and touches no table, so it runs on a reader
thread without any lock; the others are guarded by the pool's lock. ``budget`` bounds the memory of
the copies, whoever still refers to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mstar_tp.common.confined_files import confined
from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.adapters import Adapter, AdapterTable
from mstar_tp.engine.resources.lora.cpu_cache.membership import CpuCache
from mstar_tp.engine.resources.lora.cpu_cache.memory_budget import CpuCacheBudget
from mstar_tp.engine.resources.lora.cpu_cache.read_throttle import ReadThrottle
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord, fingerprint
from mstar_tp.lora.format.batch_checks import AdapterChecker
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

if TYPE_CHECKING:
    import torch

    from mstar_tp.lora.reading.base_weights import BaseWeights

logger = logging.getLogger(__name__)


class LoraAdapterStore:
    """Holds at most ``spec.cpu_capacity`` adapters, or bytes of them; only this rank's slices.

    They are page-locked where ``page_locked`` says. ``base`` answers for copies of base weights in
    adapter files. ``others`` are the specs of the model's other stages, whose part of an adapter is
    theirs.
    """

    def __init__(
        self,
        spec: LoraSpec,
        rank: int,
        world_size: int,
        page_locked: bool,
        dtype: torch.dtype,
        base: BaseWeights | None = None,
        others: Sequence[LoraSpec] = (),
    ) -> None:
        self.spec = spec
        self.adapters = AdapterTable()
        self.cpu_cache = CpuCache(spec.cpu_capacity, self.cost_of)
        self.budget = CpuCacheBudget(spec.cpu_capacity)
        self.checker = AdapterChecker(spec, others)
        self.throttle = ReadThrottle()
        self.roots: tuple[str, ...] = ()
        """Real paths of the folders that adapters loaded at run time must lie in; none: anywhere.
        """
        self.others = others
        self._rank = rank
        self._world_size = world_size
        self._page_locked = page_locked
        self._dtype = dtype
        self._base = base
        self.num_copies = 0
        """Held adapters whose copy is in."""
        self.num_elsewhere = 0
        """Registered adapters that do not change this stage."""
        self._sizes: dict[tuple[int, tuple[str, ...], tuple[str, ...]], int] = {}
        """(rank, targets, biased) -> bytes of such an adapter's copy, where it replaces no rows.

        A fleet has few kinds. Any thread."""

    def charge(self, record: AdapterRecord) -> int:
        """The cost of fetching the adapter: 1, or the bytes of the rank with the largest shard.

        It follows from its header, so it is equal on all ranks.

        Raises:
            AdapterError: it costs more than the whole CPU cache may.
        """
        if self.spec.cpu_unit == "adapters":
            return 1
        cost = max(self._bytes_on(rank, record) for rank in range(self._world_size))
        if cost > self.spec.cpu_capacity:
            raise AdapterError(
                f"adapter {record.adapter!r} takes {cost} bytes of host memory on a rank, wanted "
                f"at most {self.spec.cpu_capacity}: raise --max-cpu-lora-bytes"
            )
        return cost

    def check_slots(self, records: Sequence[AdapterRecord]) -> None:
        """Refuse a bound in bytes under which the configured adapters could not fill the slots.

        Raises:
            AdapterError: saying how many bytes are wanted.
        """
        if self.spec.cpu_unit == "adapters":
            return
        largest = sorted(map(self.charge, records), reverse=True)[: self.spec.slots]
        if sum(largest) > self.spec.cpu_capacity:
            raise AdapterError(
                f"max_cpu_lora_bytes is {self.spec.cpu_capacity}, wanted at least {sum(largest)}: "
                f"what the {len(largest)} largest configured adapters, one a slot, take on a rank"
            )

    def over_capacity(
        self,
        key: AdapterKey,
        record: AdapterRecord,
        pinned: bool,
        kept: Sequence[AdapterKey],
        others: Sequence[AdapterKey],
    ) -> str | None:
        """The reason why ``key`` cannot be served, ``pinned`` or not; None when it can.

        Beside it and the ``kept`` adapters, which are pinned, a slot, and room in the CPU cache,
        must be left for any of the ``others``.
        """
        if not record.targets:
            return None
        names, slots = len({k.name for k in kept}), self.spec.slots
        if pinned and names + 1 >= slots:
            return (
                f"pinned: adapter {key.name!r} cannot be pinned: of {slots} slots {names} are kept "
                "for pinned adapters, and one must be left for the others: unload a pinned one or "
                "raise max_loras"
            )
        if self.spec.cpu_unit == "adapters":
            return None
        wanted = sum(map(self.cost_of, kept)) + self.charge(record)
        if pinned:
            wanted += max(map(self.cost_of, others), default=0)
        if wanted > self.spec.cpu_capacity:
            return (
                f"pinned: adapter {key.name!r}, the pinned ones and the largest of the others take "
                f"{wanted} bytes of host memory on a rank, and there are {self.spec.cpu_capacity}: "
                "unload a pinned one or raise max_cpu_lora_bytes"
            )
        return None

    def check(self, name: str, path: str) -> AdapterRecord:
        """Check an adapter folder by its header; return what stays until it is read.

        Blocks on the disk.

        Raises:
            AdapterError: it cannot be served.
        """
        file = self.checker.check(name, path)
        for note in file.notes if self._rank == 0 else ():
            logger.warning("adapter %r (%s): %s", name, path, note)
        return AdapterRecord.of(file, path)

    def within(self, key: AdapterKey) -> AbstractContextManager[None]:
        """The confinement under which this thread opens files of ``key``.

        An adapter loaded at run time lies in the folders for that, also when a link was swapped
        since its load was asked for.
        """
        loaded = bool(self.roots) and key.generation != FIRST_GENERATION
        return confined(self.roots if loaded else None)

    def register(self, adapter: Adapter) -> None:
        """Note what fetching a committed adapter costs, and whether it changes this stage."""
        self.note(adapter, self.charge(adapter.registration), bool(adapter.registration.targets))

    def note(self, adapter: Adapter, cost: int, has_part: bool) -> None:
        """Fill in a committed adapter's record."""
        adapter.cost, adapter.has_part = cost, has_part
        self.num_elsewhere += not has_part

    def forget(self, adapter: Adapter) -> None:
        """The adapter's record ends."""
        self.num_elsewhere -= not adapter.has_part

    def has_part(self, key: AdapterKey) -> bool:
        """Return whether an adapter changes this stage; True for one that is not known."""
        adapter = self.adapters.get(key)
        return adapter is None or adapter.has_part

    def cost_of(self, key: AdapterKey) -> int:
        """Units of the CPU cache that a registered adapter takes."""
        return self.adapters[key].cost

    def shard_bytes(self, record: AdapterRecord) -> int:
        """Bytes of this rank's copy."""
        return self._bytes_on(self._rank, record)

    def put(self, copy: LoadedAdapter, fetch_no: int) -> bool:
        """Keep the copy if fetch ``fetch_no`` of its adapter still stands; whether it was kept."""
        if self.cpu_cache.number(copy.key) != fetch_no:
            return False
        adapter = self.adapters[copy.key]
        self.num_copies += adapter.copy is None
        adapter.copy = copy
        return True

    def get(self, key: AdapterKey) -> LoadedAdapter | None:
        """The copy of a held adapter, or None while it is not in."""
        adapter = self.adapters.get(key)
        return None if adapter is None else adapter.copy

    def discard(self, adapter: Adapter) -> None:
        """The CPU cache holds the adapter no more: its copy goes too."""
        self.num_copies -= adapter.copy is not None
        adapter.copy = None

    def read(
        self,
        key: AdapterKey,
        record: AdapterRecord | str,
        digest: str | None = None,
        before_copy: Callable[[], None] = lambda: None,
    ) -> LoadedAdapter:
        """Read, check and shard an adapter (or the one in a folder), and keep nothing of it.

        Blocks on the disk. No memory is page-locked before ``before_copy``, which is called once
        the headers are checked.

        Raises:
            AdapterError: the file is refused, has changed since its check, or does not hash to
                ``digest``.
        """
        from mstar_tp.lora.reading.shards import read_adapter  # needs torch: a replay reads nothing

        if isinstance(record, str):
            record = self.check(key.name, record)
        file = self.checker.check(key.name, record.path)
        # Once weights were served, their digest says whether a file that was put back is the same.
        moved = digest is None and file.identity != record.identity
        if moved or fingerprint(file) != record.fingerprint:
            raise AdapterError(
                f"adapter {key.name!r}: {file.path} has changed since it was loaded: load it "
                "again under its name"
            )
        before_copy()
        return read_adapter(
            self.spec,
            key,
            file,
            rank=self._rank,
            world_size=self._world_size,
            dtype=self._dtype,
            page_locked=self._page_locked,
            digest=digest,
            base=self._base,
            rest=self.throttle.reader(),
        )

    def _bytes_on(self, rank: int, record: AdapterRecord) -> int:
        from mstar_tp.lora.reading.shards import shard_bytes

        alike = (rank, record.targets, record.biased)
        known = self._sizes.get(alike) if not record.saved_ids else None
        if known is None:
            known = shard_bytes(self.spec, record, rank, self._world_size, self._dtype)
            if not record.saved_ids:
                self._sizes[alike] = known
        return known
