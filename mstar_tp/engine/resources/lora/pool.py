"""Which adapter sits in which slot, on every rank alike: the pool a step takes its adapters from.

Threads: main calls everything that carries a request, a load or an order; the step thread calls
admit, rollback, plan and commit; reader threads land copies. ``tables`` says what is guarded,
``admit`` how slots are handed out, ``fetches`` how copies come and go, ``loads`` which adapters are
served, ``current`` which step's deltas are added.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mstar_tp.engine.graphs.buckets import Variant
from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch
from mstar_tp.engine.resources.lora.admit import Admitter
from mstar_tp.engine.resources.lora.context import PoolContext, device_slots
from mstar_tp.engine.resources.lora.cpu_cache.fetches import FetchTracker
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Readers, ReaderThreads
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.rank_copies import unreadable
from mstar_tp.engine.resources.lora.registry.loads import AdapterLoads
from mstar_tp.engine.resources.lora.registry.validation import Validated
from mstar_tp.engine.resources.lora.reports import (
    LoraDebugState,
    adapter_states,
    check_clean,
    debug_state,
    host_state,
    stats,
    table_rows,
)
from mstar_tp.engine.resources.lora.step_deltas import CurrentDeltas
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.engine.table_rows import StageRow
from mstar_tp.lora.device.addressing import LoraAddressing
from mstar_tp.lora.spec import ZERO_SLOT, LoraReqConfig, LoraSpec
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.states import AdapterState, CpuCacheState, FailedRead, LoraStats
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    import torch

    from mstar_tp.distributed.comm import JointGroups
    from mstar_tp.lora.device.delta_plan import DeltaPlan
    from mstar_tp.lora.device.deltas import LoraLayerDelta
    from mstar_tp.lora.device.tiles import TileBuffer

__all__ = ["CopyState", "LoraAdapterPool", "LoraDebugState"]


class LoraAdapterPool:
    """``decides`` marks the leader's pool: only there do claims and the copies' view work.

    ``report`` is called once for each held copy that has landed, on a reader or the main thread,
    and must not block.
    """

    def __init__(
        self,
        spec: LoraSpec,
        *,
        device: torch.device | str,
        groups: JointGroups,
        dtype: torch.dtype,
        decides: bool,
        report: Callable[[CopyIn], None],
        readers: int = 2,
        read_timeout_s: float = 120.0,
        make_readers: Callable[[Land], Readers] | None = None,
        context: PoolContext | None = None,
    ) -> None:
        self.spec = spec
        self.stage = (context or PoolContext()).stage
        self.rank = groups.tp.rank
        self._decides = decides
        context = context or PoolContext()
        world_size = groups.tp.world_size
        page_locked = str(device).startswith("cuda")
        self._shares_cores = not page_locked
        self.store = context.store or LoraAdapterStore(
            spec, self.rank, world_size, page_locked, dtype, context.base, context.others
        )
        self.weights = context.weights or device_slots(
            spec,
            groups,
            device,
            dtype,
            invariant=context.invariant,
            backend=context.backend,
        )
        self.store.budget.reap = self.weights.reap
        self.store.roots = context.roots
        self._tables = PoolTables(spec.slots, self.store.cpu_cache, world_size)
        threads = make_readers or (
            lambda land: context.wrap_readers(ReaderThreads(readers, read_timeout_s, land))
        )
        self._fetches = FetchTracker(
            self.rank, self._tables, self.store, report, threads, self.stage.number
        )
        self._admitter = Admitter(
            groups, self._tables, self._fetches, self.weights, context.recorder, self.stage.number
        )
        self._loads = AdapterLoads(
            self._tables, self._fetches, self.store, context.recorder, self.stage.number
        )
        self._deltas = CurrentDeltas(self.rank, self.weights)

    @property
    def steps_waited_for_read(self) -> int:
        """Steps whose admit had to wait for a copy; 0 while R7 holds."""
        return self._admitter.steps_waited_for_read

    # ------------------------------------------------------- start, loads and unloads (main)

    def preload(
        self,
        configured: Sequence[tuple[AdapterKey, str]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        limits: Mapping[AdapterKey, AdapterLimits] | None = None,
    ) -> dict[str, int]:
        """Serve the configured adapters and begin the reads of the pinned and of the first: of
        each, a hash of what its header says to decide by.

        Raises:
            AdapterError: naming every configured adapter that cannot be served, one a line.
        """
        return self._loads.preload(configured, progress, limits or {})

    def load_adapter_async(
        self,
        key: AdapterKey,
        path: str,
        done: Callable[[str | None, int, tuple[str, ...]], None],
    ) -> None:
        """Check a file's header on another thread, which calls ``done(cause, rank, changes)``."""
        self._loads.begin(key, path, done)

    def commit_load(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """From here on requests may name ``key``, also where ``replaces`` is served; or why it is
        not served after all. With ``digest``, weights that hash otherwise are never served.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        return self._loads.commit(key, path, digest, replaces, limits)

    def leaves_no_room(self, key: AdapterKey, limits: AdapterLimits) -> str | None:
        """Why an accepted load cannot be committed: of the slots or the CPU cache, pinned adapters
        would leave others none. None where they do, or it was never accepted.
        """
        return self._loads.leaves_no_room(key, limits)

    def limits_of(self, key: AdapterKey) -> AdapterLimits:
        """Return what a served or retiring adapter may take.

        Main.
        """
        return self._tables.registry.limits(key)

    def validate_async(self, name: str, path: str, done: Validated) -> None:
        """Validate a file whole on another thread, which calls ``done``; keep nothing."""
        self._loads.validator(name, path, done)

    def abort_load(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``."""
        self._loads.abort(key)

    def unload_adapter(self, key: AdapterKey) -> bool:
        """From here on requests may not name ``key``; whether it was served."""
        return self._loads.unload(key)

    @property
    def has_retired(self) -> bool:
        """Return whether ``forget_retired`` has something to forget."""
        return self._loads.any_to_forget

    def forget_retired(self) -> None:
        """Forget the slots of what was unloaded, and that they were pinned. At the fence."""
        self._loads.forget()

    # ------------------------------------------------------- requests (main)

    def ingest_request(self, rid: int, config: LoraReqConfig) -> str | None:
        """Open a request; why it can never run, or None. Idempotent."""
        key, tables = config.adapter, self._tables
        reports: list[CopyIn] = []
        with tables.lock:
            known = rid in tables.assigned or tables.cpu_cache.key_of(rid) is not None
            if not known and rid not in tables.dead:
                if key is None:
                    tables.assigned.add(rid)
                elif not tables.registry.served(key):
                    tables.dead[rid] = f"adapter {key.name!r} is not served: it was unloaded"
                elif self.store.has_part(key) and self.stage.runs(config.has_images):
                    reports = self._fetches.apply(tables.cpu_cache.ingest(rid, key))
                else:  # its rows never run on the adapter here
                    tables.assigned.add(rid)
            cause = tables.dead.get(rid)
        self._fetches.send(reports)
        return cause

    def remove_request(self, rid: int) -> None:
        """Close a request: its slot hold, its claim, its place in the tier's order.

        At the fence (R3). Unknown: a no-op.
        """
        tables = self._tables
        reports: list[CopyIn] = []
        with tables.lock:
            key = tables.cpu_cache.key_of(rid)
            tables.assigned.discard(rid)
            tables.dead.pop(rid, None)
            tables.claims.pop(rid, None)
            tables.slots.release(rid)
            if key is not None:
                # Its claim ends, or another adapter, whose copy may be in, is kept in its place.
                tables.growth += 1
                reports = self._fetches.apply(tables.cpu_cache.remove(rid))
                self._loads.forget_if_unused(key)
        self._fetches.send(reports)

    def has_part(self, key: AdapterKey) -> bool:
        """Return whether a registered adapter changes this node."""
        with self._tables.lock:
            return self.store.has_part(key)

    def early_read(self, key: AdapterKey) -> None:
        """A body that is not ordered yet names ``key``: maybe start its read, and nothing else
        (R2).
        """
        with self._tables.lock:
            self._fetches.early(key)

    def drop_copy(self, key: AdapterKey, fetch_no: int, rank: int, cause: str) -> None:
        """``rank`` could not read hold ``fetch_no``: drop it here too; requests waiting on it are
        spent (R7). At the fence.
        """
        why = unreadable(key, rank, cause)
        with self._tables.lock:
            changes = self._tables.cpu_cache.drop(key, fetch_no, why)
            self._tables.agreed_failures += key in changes.dropped
            reports = self._fetches.apply(changes)
            self._tables.growth += 1
        self._fetches.send(reports)

    def waiting_on(self, key: AdapterKey) -> list[int]:
        """Live requests on ``key`` that hold no slot, in ingest order."""
        with self._tables.lock:
            return [r for r in self._tables.cpu_cache.users(key) if r not in self._tables.assigned]

    @property
    def any_held(self) -> bool:
        """Return whether any request holds a slot."""
        return self._tables.slots.any_held

    def slot_of(self, rid: int) -> int:
        """The slot the request holds; ZERO_SLOT for base rows and before its first admit."""
        with self._tables.lock:
            return self._tables.slots.slot_of(rid) or ZERO_SLOT

    # ------------------------------------------------------- the leader's view (main, leader)

    def copy_in(self, report: CopyIn) -> str | None:
        """Note one rank's report; the adapter's digest when it made the copy complete, else
        None.
        """
        assert self._decides, "only the leader counts copies"
        with self._tables.lock:
            if not self._tables.copies.report(report):
                return None
            self._tables.growth += 1
            complete = self._tables.copies.all_in(report.key)
            return self._tables.copies.agreed_digest(report.key) if complete else None

    def digest_of(self, key: AdapterKey) -> str | None:
        """Of this node's part of an adapter; None before every rank has read it once."""
        with self._tables.lock:
            return self._tables.copies.agreed_digest(key)

    def fingerprint(self, key: AdapterKey) -> str | None:
        """Of what an adapter does in this node: the digest of its part, as far as all ranks have
        agreed on it. One without a part is told by its own key. Any thread.
        """
        with self._tables.lock:
            if not self.store.has_part(key):
                return f"nothing here: {key}"
            return self._fetches.agreed_digest(key) or self._tables.copies.agreed_digest(key)

    def needs_copy(self, rid: int) -> bool:
        """Return whether the request runs on an adapter here."""
        with self._tables.lock:
            return self._tables.cpu_cache.key_of(rid) is not None

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """Whether the request may join the admission queue: IN, WAITING, or why it never will."""
        with self._tables.lock:
            return self._tables.request_state(rid)

    def settled(self, waiting: Container[int]) -> list[tuple[int, CopyState | AskFailed]]:
        """Those of the ``waiting`` requests that need wait no more: IN, or why they never run."""
        with self._tables.lock:
            return self._tables.settled(waiting)

    def failed_copies(self) -> list[tuple[AdapterKey, int, int, str]]:
        """(adapter, fetch number, rank, cause) of failed copies in no slot: each is for one ordered
        DropCopy, and returned once.
        """
        copies, slots = self._tables.copies, self._tables.slots
        with self._tables.lock:
            failed = [f for f in copies.unannounced() if slots.resident(f[0]) is None]
            for key, _, _, _ in failed:
                copies.announce(key)
            return failed

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """None for base rows and rows that have a claim or a slot, the failure of a lost adapter,
        NOT_IN while its copy is not in everywhere, else ASKS.
        """
        with self._tables.lock:
            if rid in self._tables.claims or rid in self._tables.assigned:
                return None
            state = self._tables.request_state(rid)
            if isinstance(state, AskFailed):
                return state
            return Ask.ASKS if state is CopyState.IN else Ask.NOT_IN

    def reserve(self, rid: int) -> int | None:
        """Claim a slot's worth for the row's adapter, counted once an adapter: 1, or 0 for one that
        is claimed already; None while its copy is not in everywhere or the slots are spoken for.
        """
        assert self._decides, "only the leader reserves"
        tables = self._tables
        with tables.lock:
            key = tables.cpu_cache.key_of(rid)
            assert key is not None, f"request {rid} reserves a slot without an adapter"
            if tables.request_state(rid) is not CopyState.IN:
                return None
            claimed = tables.claimed_adapters()
            new = int(key not in claimed)
            if new and not tables.has_place(key, self._loads.pinned()):
                return None
            tables.claims[rid] = key
            return new

    def unreserve(self, rid: int) -> None:
        """Forget the claim of a row that holds no slot yet; a no-op else."""
        tables = self._tables
        with tables.lock:
            if rid not in tables.assigned and tables.claims.pop(rid, None) is not None:
                tables.growth += 1

    def growth_mark(self) -> int:
        """What ``grew_since`` compares with."""
        return self._tables.growth

    def grew_since(self, mark: int) -> bool:
        """Whether a waiting head should be retried: a claim ended, a copy settled or was dropped,
        an adapter was evicted; not when a claim becomes a hold.
        """
        return self._tables.growth != mark

    # ------------------------------------------------------- steps (step thread)

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Give every row of the step its adapter's slot.

        Collective on the block's CPU twin when some adapter is in no slot; with all rows seated it
        is one set check.

        ``failed`` names every dead row of the step, so also those an earlier admit failed.

        Raises:
            LockstepError: the ranks are in different admits, or miss different adapters.
        """
        if self._shares_cores:
            self.store.throttle.stepped()
        return self._admitter.admit(step)

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back the slots this admit took; an adapter it installed stays resident, unheld."""
        self._admitter.rollback()
        self._deltas.end()

    def plan(self, step: StepBatch, tables: TileBuffer | None = None) -> LoraAddressing | None:
        """Lay the step out for its deltas; None when no row has an adapter.

        Current until it ends. ``tables``: where a graph reads it.
        """
        slots, counts = self.lay_out(step, tables)
        return LoraAddressing.of(slots, counts, self.spec.slots) if any(slots) else None

    def lay_out(
        self, step: StepBatch, tables: TileBuffer | None = None
    ) -> tuple[list[int], list[int]]:
        """``plan`` for who does not ask for addresses: the slot and the number of tokens of each
        row; nothing where no request holds a slot.
        """
        if not self.any_held:
            self._deltas.begin((), (), ())
            return [], []
        slot_of = self._tables.slots.slot_of
        rows = self.stage.rows(step).rows
        slots = [slot_of(rid) or ZERO_SLOT for rid, _ in rows]
        counts = [num_tokens for _, num_tokens in rows]
        head_rows: list[int] = []
        for row in step.rows:
            head_rows += [slot_of(row.rid) or ZERO_SLOT] * row.num_head_rows
        self._deltas.begin(slots, counts, head_rows, tables)
        return slots, counts

    def commit(self, step: StepBatch) -> None:
        """The step ran: nothing of its plan is current any more."""
        self._admitter.settle()
        self._deltas.end()

    def base_only(self) -> AbstractContextManager[None]:
        """A forward outside any step on this thread: deltas add nothing; what stood before comes
        back.
        """
        return self._deltas.base_only()

    def variant(self, step: StepBatch) -> Variant | None:
        """Which graph of this node runs the step's deltas; None: none launches all of them."""
        slot_of = self._tables.slots.slot_of
        slots = {slot for rid, _ in self.stage.rows(step).rows if (slot := slot_of(rid))}
        if not slots:
            return Variant.BASE
        return Variant.DELTAS if self.weights.can_capture(tuple(slots)) else None

    def graph_tables(self, num_rows: int) -> TileBuffer | None:
        """Where steps of up to ``num_rows`` rows are laid out for a graph; None where no graph can
        hold this node's deltas. Start.
        """
        return self.weights.graph_tables(num_rows)

    def captured(self, tables: TileBuffer, num_rows: int) -> AbstractContextManager[None]:
        """The forward that a graph over ``num_rows`` rows is captured from, on this thread: its
        deltas are of whatever stands in ``tables``. What stood before comes back.
        """
        return self._deltas.standing(self.weights.captured_plan(tables, num_rows))

    def current_plan(self) -> DeltaPlan:
        """The plan of the step this thread runs.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        return self._deltas.get()

    def layer_delta(self, target: str, layer: int) -> LoraLayerDelta:
        """Return what a bound module calls: adds this step's deltas of one layer of one target."""
        from mstar_tp.lora.device.deltas import LoraLayerDelta

        return LoraLayerDelta(self, self.weights.layer(target, layer))

    # ------------------------------------------------------- checks and reports

    def slots_hash(self) -> int:
        """The slot table's running hash; between steps, as of the last settled admit."""
        with self._tables.lock:
            return self._tables.slots.hash()

    def cpu_cache_hash(self) -> int:
        """The cache membership's running hash. Main."""
        return self.store.cpu_cache.hash()

    def served_hash(self) -> int:
        """The running hash of which names are served. Main."""
        with self._tables.lock:
            return self._tables.registry.hash()

    def table_rows(self, table: str) -> tuple[StageRow, ...]:
        """The rows of ``slots``, ``cpu_cache`` or ``served``. Between two steps."""
        return table_rows(self._tables, table)

    def debug_state(self) -> LoraDebugState:
        """Slots with holders, the tier's members and the served names. Between two steps."""
        return debug_state(self._tables)

    def host_state(self) -> CpuCacheState:
        """The CPU cache's bound and what counts against it on this rank now."""
        return host_state(self.store)

    def failed_reads(self) -> tuple[FailedRead, ...]:
        """Adapters whose last read failed on some rank; nothing but on the leader."""
        with self._tables.lock:
            return self._tables.copies.failed_reads()

    def adapter_states(self, keys: Sequence[AdapterKey] | None = None) -> tuple[AdapterState, ...]:
        """Where each of ``keys`` is on this rank, of those that are known; None: those that are in
        memory or named by requests. Main; may run beside a step.
        """
        return adapter_states(self._tables, self.store, self._fetches, self.stage.name, keys)

    def stats(self) -> LoraStats:
        """The pool in numbers, now. Main; may run beside a step."""
        return stats(self._tables, self.store, self._fetches, self.steps_waited_for_read)

    def post_warmup_validate(self) -> None:
        """After warm-up no slot is held and no request is known.

        Raises:
            LockstepError: naming what is left.
        """
        check_clean(self._tables, self.rank)

    def close(self) -> None:
        """Stop the readers. Reads under way end by themselves and land nowhere."""
        self._fetches.close()
