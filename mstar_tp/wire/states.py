"""Reports that answer questions: a rank's tables, and its figures; rank -> frontend."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from mstar_tp.wire.adapter_limits import AdapterShare
from mstar_tp.wire.schedule import Checks
from mstar_tp.wire.stats import PrefixStats, ProcessStats, StepStats
from mstar_tp.wire.values import AdapterKey, Message

MAX_STATES = 1000
"""Adapters of a stage in one state report."""


class Place(StrEnum):
    """The place of an adapter, nearest first."""

    DEVICE = "device"
    """The adapter is in a slot, held or as a cache."""
    HOST = "host"
    """The adapter is in the CPU cache, and in no slot."""
    READING = "reading"
    """The CPU cache has room for it, and its read is under way."""
    DISK = "disk"
    FAILED = "failed"
    """Its last read failed, and it is in no memory."""


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    slot: int
    adapter: AdapterKey | None
    holders: tuple[int, ...]


class FailedRead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last read of an adapter failed, on ``rank`` first, in hold ``fetch_no``."""

    adapter: AdapterKey
    fetch_no: int
    rank: int
    cause: str
    stage: str = ""
    """The stage whose part of the adapter it is, on a model of several stages."""


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of one adapter on one rank, in one of the model's stages."""

    adapter: AdapterKey
    stage: str = ""
    slot: int | None = None
    """The device slot that has its weights, held or as a cache."""
    host: Literal["in", "reading", "failed"] | None = None
    """Its copy in the CPU cache; None: the tier does not hold it."""
    num_bytes: int = 0
    """The bytes of this rank's copy, in memory or not."""
    hits: int = 0
    """Requests that found it in a slot."""
    installs: int = 0
    """Times it was copied into a slot."""
    evictions: int = 0
    """Times another took its slot."""
    running: int = 0
    """The number of live requests that hold its slot."""
    waiting: int = 0
    """and those that wait: for its copy, a slot, pages, their turn."""
    cause: str | None = None
    """Why its last read failed on some rank, as far as this one knows."""

    @property
    def place(self) -> Place:
        """Return where it is, in one word."""
        if self.slot is not None:
            return Place.DEVICE
        if self.host is not None:
            return {"in": Place.HOST, "reading": Place.READING, "failed": Place.FAILED}[self.host]
        return Place.DISK if self.cause is None else Place.FAILED


class CpuCacheState(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU cache's bound and what counts against it, in ``unit``s ("adapters" or "bytes").

    ``used`` follows from the order; ``memory_bytes`` is this rank's memory for copies now, reads in
    flight and copies still moving to the device included, and ``peak`` the most that ever was in
    memory at once, in ``unit``.
    """

    unit: str
    capacity: int
    used: int
    peak: int
    memory_bytes: int
    peak_bytes: int


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """Slots and CPU cache of one of a model's stages, by its name."""

    stage: str
    slots: tuple[SlotState, ...]
    cpu_cache: tuple[AdapterKey, ...]
    host: CpuCacheState


class KvHostState(msgspec.Struct, frozen=True, kw_only=True):
    """KV of preempted requests in a rank's host memory; counters go up from its start."""

    pages_used: int = 0
    pages_total: int = 0
    offloads: int = 0
    reloads: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    recomputed_tokens: int = 0
    """The tokens of preempted requests whose KV was given up."""


class StateReport(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's tables at an Inspect's place in the order.

    ``slots``, ``cpu_cache`` and ``host`` are the decoder's, ``other_stages`` those that run before
    it.
    """

    rank: int
    query_id: int
    requests: tuple[int, ...]
    pages_used: int
    pages_total: int
    slots: tuple[SlotState, ...]
    cpu_cache: tuple[AdapterKey, ...]
    served: tuple[AdapterKey, ...]
    """The names that new requests may use, in the order they came."""
    host: CpuCacheState | None
    failed_reads: tuple[FailedRead, ...]
    """The leader's memory of reads that failed on any rank, oldest first.

    A later read that succeeds ends an entry.
    """
    waiting: int
    running: int
    steps: int
    steps_waited_for_read: int
    preemptions: int
    gap_us: int
    """Median time between two forwards over the last steps, idle times included."""
    checks: Checks
    other_stages: tuple[StageState, ...] = ()
    adapters: tuple[AdapterState, ...] = ()
    """The adapters of every stage that are in a slot, in the CPU cache or named by requests.

    There are at most ``MAX_STATES``.
    """
    kv_host: KvHostState = KvHostState()
    prefix: PrefixStats = PrefixStats()
    shares: tuple[AdapterShare, ...] = ()
    """Adapters with requests, the base model among them; the leader's."""
    waiting_for_reads: int = 0
    """The number of waiting requests that wait for some rank's copy of their adapter."""
    waiting_for_grammars: int = 0


class PlaceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of adapters in each place on one rank, each counted once.

    Counted are those that change the stage.

    What failed is known on the leader: on other ranks it counts as being read, then as on disk.
    """

    device: int = 0
    host: int = 0
    reading: int = 0
    disk: int = 0
    failed: int = 0


class LoraStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's adapters in numbers; of one ``stage`` where the model has several."""

    slots: int
    slots_held: int
    evictions: int
    agreed_failures: int
    """Copies that some rank could not read: dropped by all, or failed by all in an admit."""
    steps_waited_for_read: int
    adapters_held: int
    """The number of adapters in the CPU cache now."""
    adapters_taken: int
    """Into the CPU cache since the start, each with a read."""
    cpu_cache: CpuCacheState
    places: PlaceCounts
    stage: str = ""


class RankStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One rank in numbers, wherever it was when the Measure came. Counters go up from its start."""

    rank: int
    query_id: int
    steps: int
    preemptions: int
    waiting: int
    """Requests that wait for copies or resources; only the leader has any."""
    running: int
    requests: int
    pages_used: int
    pages_total: int
    lora: tuple[LoraStats, ...]
    """One a stage, in graph order; none without adapters."""
    timing: StepStats | None = None
    process: ProcessStats | None = None
    kv_host: KvHostState = KvHostState()
    prefix: PrefixStats = PrefixStats()
    adapters: tuple[AdapterState, ...] = ()
    """Those that the Measure names and the rank knows, one a stage."""


class Located(Message, frozen=True, kw_only=True):
    """A rank's answer to a Locate; adapters that it does not know are left out."""

    rank: int
    query_id: int
    adapters: tuple[AdapterState, ...]
