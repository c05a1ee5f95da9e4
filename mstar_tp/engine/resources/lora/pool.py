"""The adapter slots of one stage on one rank: the pool that a step takes its adapters from.

Main calls everything that carries a request or a report; the step thread calls admit, rollback,
plan and commit; reader threads land copies. The parts are public, and callers hold them:
``loads`` serves and unloads adapters, ``fetches`` keeps the CPU cache's copies, ``deltas`` is the
plan of the step that runs, ``reports`` says what the tables hold. ``tables`` says what is guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Container
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
from mstar_tp.engine.resources.lora.reports import PoolReports, check_clean
from mstar_tp.engine.resources.lora.step_deltas import CurrentDeltas
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.lora.spec import ZERO_SLOT, LoraReqConfig, LoraSpec
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    import torch

    from mstar_tp.distributed.comm import JointGroups
    from mstar_tp.lora.device.tiles import TileBuffer

__all__ = ["CopyState", "LoraAdapterPool"]


class LoraAdapterPool:
    """A ``Resource``: each row of a step needs its adapter in a slot of the device.

    ``decides`` marks the leader's pool: only there do reservations and the ranks' reports work.
    ``report`` is called once for each fetched copy that has landed, on a reader or the main thread,
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
        self.tables = PoolTables(spec.slots, self.store.cpu_cache, world_size, self.store.adapters)
        threads = make_readers or (
            lambda land: context.wrap_readers(ReaderThreads(readers, read_timeout_s, land))
        )
        self.fetches = FetchTracker(
            self.rank, self.tables, self.store, report, threads, self.stage.number
        )
        self._admitter = Admitter(
            groups, self.tables, self.fetches, self.weights, context.recorder, self.stage.number
        )
        self.loads = AdapterLoads(
            self.tables, self.fetches, self.store, context.recorder, self.stage.number
        )
        self.deltas = CurrentDeltas(self.rank, self.weights)
        self.reports = PoolReports(self.tables, self.store, self._admitter, self.stage.name)

    # ------------------------------------------------------- requests (main)

    def ingest_request(self, rid: int, config: LoraReqConfig) -> str | None:
        """Open a request; return why it can never run, or None. Idempotent."""
        key, tables = config.adapter, self.tables
        reports: list[CopyIn] = []
        with tables.lock:
            known = rid in tables.assigned or tables.cpu_cache.key_of(rid) is not None
            if not known and rid not in tables.dead:
                if key is None:
                    tables.assigned.add(rid)
                elif not tables.registry.served(key):
                    tables.dead[rid] = f"adapter {key.name!r} is not served: it was unloaded"
                elif tables.adapters[key].has_part and self.stage.runs(config.has_images):
                    reports = self.fetches.apply(tables.cpu_cache.ingest(rid, key))
                else:  # its rows never run on the adapter here
                    tables.assigned.add(rid)
            cause = tables.dead.get(rid)
        self.fetches.send(reports)
        return cause

    def remove_request(self, rid: int) -> None:
        """Close a request: its slot, its reservation and its place in the CPU cache's order.

        At the fence (R3). A no-op for an unknown request.
        """
        tables = self.tables
        reports: list[CopyIn] = []
        with tables.lock:
            key = tables.cpu_cache.key_of(rid)
            tables.assigned.discard(rid)
            tables.dead.pop(rid, None)
            tables.claims.pop(rid, None)
            tables.slots.release(rid)
            if key is not None:
                # Its reservation ends, or another adapter, whose copy may be in, is now kept.
                tables.growth += 1
                reports = self.fetches.apply(tables.cpu_cache.remove(rid))
                self.loads.forget_if_unused(key)
        self.fetches.send(reports)

    def drop_copy(self, key: AdapterKey, fetch_no: int, rank: int, cause: str) -> None:
        """Drop the copy of fetch ``fetch_no``, which ``rank`` could not read (R7). At the fence.

        Requests that wait for it have failed.
        """
        why = unreadable(key, rank, cause)
        with self.tables.lock:
            changes = self.tables.cpu_cache.drop(key, fetch_no, why)
            self.tables.agreed_failures += key in changes.dropped
            reports = self.fetches.apply(changes)
            self.tables.growth += 1
        self.fetches.send(reports)

    def slot_of(self, rid: int) -> int:
        """The slot the request holds; ZERO_SLOT for base rows and before its first admit."""
        with self.tables.lock:
            return self.tables.slots.slot_of(rid) or ZERO_SLOT

    def fingerprint(self, key: AdapterKey) -> str | None:
        """The digest of what an adapter does in this stage, as far as all ranks have agreed on it.

        An adapter that changes nothing here is told by its own key. Any thread.
        """
        with self.tables.lock:
            adapter = self.tables.adapters.get(key)
            if adapter is not None and not adapter.has_part:
                return f"nothing here: {key}"
            agreed = None if adapter is None else adapter.agreed_digest
            return agreed or self.tables.copies.agreed(key)

    # ------------------------------------------------------- the leader's view (main, leader)

    def copy_in(self, report: CopyIn) -> str | None:
        """Note one rank's report; the adapter's digest when it made the copy complete."""
        assert self._decides, "only the leader counts copies"
        with self.tables.lock:
            if not self.tables.copies.report(report):
                return None
            self.tables.growth += 1
            complete = self.tables.copies.all_in(report.key)
            return self.tables.copies.agreed(report.key) if complete else None

    def needs_copy(self, rid: int) -> bool:
        """Return whether the request runs on an adapter here."""
        with self.tables.lock:
            return self.tables.cpu_cache.key_of(rid) is not None

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """The state of the request's copies: IN, WAITING, or why it will never be admitted."""
        with self.tables.lock:
            return self.tables.request_state(rid)

    def settled(self, waiting: Container[int]) -> list[tuple[int, CopyState | AskFailed]]:
        """Those of the ``waiting`` requests that need wait no more: IN, or why they never run."""
        with self.tables.lock:
            return self.tables.settled(waiting)

    def failed_copies(self) -> list[tuple[AdapterKey, int, int, str]]:
        """(adapter, fetch number, rank, cause) of failed copies in no slot.

        Each is for one ordered DropCopy, and returned once.
        """
        copies, slots = self.tables.copies, self.tables.slots
        with self.tables.lock:
            failed = [f for f in copies.unannounced() if slots.resident(f[0]) is None]
            for key, _, _, _ in failed:
                copies.announce(key)
            return failed

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """None for base rows and rows with a reservation or a slot, else how far its copy is.

        That is the failure of a lost adapter, NOT_IN while a rank lacks the copy, else ASKS.
        """
        with self.tables.lock:
            if rid in self.tables.claims or rid in self.tables.assigned:
                return None
            state = self.tables.request_state(rid)
            if isinstance(state, AskFailed):
                return state
            return Ask.ASKS if state is CopyState.IN else Ask.NOT_IN

    def reserve(self, rid: int) -> int | None:
        """Reserve a slot for the row's adapter: 1, or 0 when its adapter has a reservation or slot.

        None while its copy is not in everywhere or the slots are spoken for.
        """
        assert self._decides, "only the leader reserves"
        tables = self.tables
        with tables.lock:
            key = tables.cpu_cache.key_of(rid)
            assert key is not None, f"request {rid} reserves a slot without an adapter"
            if tables.request_state(rid) is not CopyState.IN:
                return None
            new = int(key not in tables.claimed_adapters())
            if new and not tables.has_place(key, self.loads.pinned()):
                return None
            tables.claims[rid] = key
            return new

    def unreserve(self, rid: int) -> None:
        """Forget the reservation of a row that holds no slot yet; a no-op else."""
        tables = self.tables
        with tables.lock:
            if rid not in tables.assigned and tables.claims.pop(rid, None) is not None:
                tables.growth += 1

    def growth_mark(self) -> int:
        """The mark that ``grew_since`` compares with."""
        return self.tables.growth

    def grew_since(self, mark: int) -> bool:
        """Return whether a reservation ended, a copy settled or went, or an adapter was evicted."""
        return self.tables.growth != mark

    # ------------------------------------------------------- steps (step thread)

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Give every row of the step its adapter's slot.

        Collective on the block's CPU twin when some adapter is in no slot; with a slot for all rows
        it is one set check. ``failed`` names every dead row of the step, so also those an earlier
        admit failed.

        Raises:
            LockstepError: the ranks are in different admits, or miss different adapters.
        """
        if self._shares_cores:
            self.store.throttle.stepped()
        return self._admitter.admit(step)

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back the slots this admit took; an adapter it installed stays resident, unheld."""
        self._admitter.rollback()
        self.deltas.end()

    def plan(self, step: StepBatch, tables: TileBuffer | None = None) -> None:
        """Lay a step out for its deltas, which are current until it ends.

        ``tables`` is where a graph reads the layout.
        """
        slots: list[int] = []
        counts: list[int] = []
        head_rows: list[int] = []
        if self.tables.slots.any_held:
            slot_of = self.tables.slots.slot_of
            for rid, num_tokens in self.stage.rows(step):
                slots.append(slot_of(rid) or ZERO_SLOT)
                counts.append(num_tokens)
            for row in step.rows:
                head_rows += [slot_of(row.rid) or ZERO_SLOT] * row.num_head_rows
        self.deltas.begin(slots, counts, head_rows, tables)

    def commit(self, step: StepBatch) -> None:
        """The step ran: nothing of its plan is current any more."""
        self._admitter.settle()
        self.deltas.end()

    def variant(self, step: StepBatch) -> Variant | None:
        """The graph of this stage that runs the step's deltas; None when none launches all."""
        slot_of = self.tables.slots.slot_of
        slots = {slot for rid, _ in self.stage.rows(step) if (slot := slot_of(rid))}
        if not slots:
            return Variant.BASE
        return Variant.DELTAS if self.weights.can_capture(tuple(slots)) else None

    def captured(self, tables: TileBuffer, num_rows: int) -> AbstractContextManager[None]:
        """The forward that a graph over ``num_rows`` rows is captured from, on this thread.

        Its deltas are those of whatever stands in ``tables``. The plan before comes back after it.
        """
        return self.deltas.standing(self.weights.captured_plan(tables, num_rows))

    def post_warmup_validate(self) -> None:
        """Check that after warm-up no slot is held and no request is known.

        Raises:
            LockstepError: naming what is left.
        """
        check_clean(self.tables, self.rank)

    def close(self) -> None:
        """Stop the readers. Reads under way end by themselves and land nowhere."""
        self.fetches.close()
