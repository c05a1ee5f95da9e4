"""The CPU cache's contents: this rank's shards of the adapters the tier holds.

``hold`` and ``drop`` are the ordered calls that decide membership (see ``cpu_cache``); ``read``
does I/O and touches no table, so it runs on a reader thread without any lock; the others are
guarded by the pool's lock. ``room`` bounds the memory of the copies, whoever still refers to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mstar_tp.common.confined_files import confined
from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.membership import CpuCache, Fetch
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
    """At most ``spec.cpu_capacity`` adapters, or bytes of them; only this rank's slices are kept,
    pinned where ``page_locked`` says. ``base`` answers for copies of base weights in adapter files.
    ``others`` are the specs of the model's other nodes, whose part of an adapter is theirs.
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
        self._copies: dict[AdapterKey, LoadedAdapter] = {}
        self._costs: dict[AdapterKey, int] = {}
        self._sizes: dict[tuple[int, tuple[str, ...], tuple[str, ...]], int] = {}
        """(rank, targets, biased) -> bytes of such an adapter's copy, where it replaces no rows: a
        fleet has few kinds. Any thread."""
        self._elsewhere: set[AdapterKey] = set()
        """Registered adapters that change other nodes alone."""

    def charge(self, record: AdapterRecord) -> int:
        """What holding the adapter costs: 1, or its largest rank's bytes; from its header, so equal
        on all ranks.

        Raises:
            AdapterError: it costs more than the whole tier may.
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

    def crowded(
        self,
        key: AdapterKey,
        record: AdapterRecord,
        pinned: bool,
        kept: Sequence[AdapterKey],
        others: Sequence[AdapterKey],
    ) -> str | None:
        """Why ``key`` cannot be served, ``pinned`` or not, beside the ``kept`` adapters, which are
        pinned, and the ``others``: a slot, and room in the CPU cache, must be left for any that is
        not pinned. None: it can.
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
        """Fit of an adapter folder, from its header: what is to be known of it until it is read.
        Blocks on the disk.

        Raises:
            AdapterError: it cannot be served.
        """
        file = self.checker.check(name, path)
        for note in file.notes if self._rank == 0 else ():
            logger.warning("adapter %r (%s): %s", name, path, note)
        return AdapterRecord.of(file, path)

    def within(self, key: AdapterKey) -> AbstractContextManager[None]:
        """Files of ``key`` are opened by this thread meanwhile: what was loaded at run time lies
        in the folders for that, also when a link was swapped since its load was asked for.
        """
        loaded = bool(self.roots) and key.generation != FIRST_GENERATION
        return confined(self.roots if loaded else None)

    def register(self, key: AdapterKey, record: AdapterRecord) -> None:
        """``key`` may be held from now on, at what ``record`` says it costs, if this node has a
        part in it.
        """
        if not record.targets:
            self._elsewhere.add(key)
        if self.spec.cpu_unit == "bytes":
            self._costs[key] = self.charge(record)

    def forget(self, key: AdapterKey) -> None:
        """``key`` will not be held again."""
        self._costs.pop(key, None)
        self._elsewhere.discard(key)

    def has_part(self, key: AdapterKey) -> bool:
        """Return whether a registered adapter changes this node."""
        return key not in self._elsewhere

    @property
    def num_elsewhere(self) -> int:
        """Registered adapters that do not change this node."""
        return len(self._elsewhere)

    @property
    def num_copies(self) -> int:
        """Held adapters whose copy is in."""
        return len(self._copies)

    def cost_of(self, key: AdapterKey) -> int:
        """Return what holding a registered adapter costs."""
        return 1 if self.spec.cpu_unit == "adapters" else self._costs[key]

    def shard_bytes(self, record: AdapterRecord) -> int:
        """Bytes of this rank's copy."""
        return self._bytes_on(self._rank, record)

    def fetch(self, key: AdapterKey, keep: Collection[AdapterKey] = ()) -> Fetch:
        """Make ``key`` the most recent, dropping the least recent that ``keep`` does not name when
        full.
        """
        outcome, dropped = self.cpu_cache.fetch(key, keep)
        for old in dropped:
            self.discard(old)
        return outcome

    def put(self, adapter: LoadedAdapter, fetch_no: int) -> bool:
        """Keep the copy if hold ``fetch_no`` of its adapter still stands; whether it was kept."""
        if self.cpu_cache.number(adapter.key) != fetch_no:
            return False
        self._copies[adapter.key] = adapter
        return True

    def get(self, key: AdapterKey) -> LoadedAdapter | None:
        """The copy of a held adapter, or None while it is not in."""
        return self._copies.get(key)

    def discard(self, key: AdapterKey) -> None:
        """The tier holds ``key`` no more: its copy goes too."""
        self._copies.pop(key, None)

    def drop(self, key: AdapterKey) -> None:
        """Forget the hold, if there is one, and its copy."""
        self.cpu_cache.drop(key)
        self.discard(key)

    def read(
        self,
        key: AdapterKey,
        record: AdapterRecord | str,
        digest: str | None = None,
        before_copy: Callable[[], None] = lambda: None,
    ) -> LoadedAdapter:
        """Read, check and shard an adapter (or the one in a folder) without holding it.

        Blocks on the disk. Nothing is pinned before ``before_copy``, which is called once the
        headers are checked.

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

    def load(
        self, key: AdapterKey, record: AdapterRecord | str, digest: str | None = None
    ) -> LoadedAdapter:
        """Fetch ``key`` and read its copy unless it is in. Blocks on the disk.

        Raises:
            AdapterError: as ``read``; the hold is given back.
        """
        if isinstance(record, str):
            record = self.check(key.name, record)
        self.register(key, record)
        self.fetch(key)
        copy = self.get(key)
        if copy is not None:
            return copy
        try:
            copy = self.read(key, record, digest)
        except BaseException:
            self.drop(key)
            raise
        number = self.cpu_cache.number(key)
        assert number is not None
        self.put(copy, number)
        return copy

    def _bytes_on(self, rank: int, record: AdapterRecord) -> int:
        from mstar_tp.lora.reading.shards import shard_bytes

        alike = (rank, record.targets, record.biased)
        known = self._sizes.get(alike) if not record.saved_ids else None
        if known is None:
            known = shard_bytes(self.spec, record, rank, self._world_size, self._dtype)
            if not record.saved_ids:
                self._sizes[alike] = known
        return known
