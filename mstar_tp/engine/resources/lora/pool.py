"""Which adapter sits in which slot, on every rank alike: the pool a step takes its adapters from.

Threads: main calls everything that carries a request, a load or an order; the step thread calls admit, rollback,
plan and commit; reader threads land copies. One lock, ``_lock``, guards every table; it is a leaf, never held
over I/O, a collective, or a wait. What is equal on all ranks: the registry, the tier's membership, the slot
table, who is seated or dead. What may differ until it is agreed on (R6): whether a copy is in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch
from mstar_tp.engine.resources.lora import ballot
from mstar_tp.engine.resources.lora.ballot import CopyState, Miss
from mstar_tp.engine.resources.lora.copies import CopyTable
from mstar_tp.engine.resources.lora.reads import Land, Read, Readers, ReaderThreads, describe
from mstar_tp.engine.resources.lora.registry import AdapterRegistry
from mstar_tp.engine.resources.lora.slots import SlotTable
from mstar_tp.engine.resources.lora.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.tier import Changes, TierMembership
from mstar_tp.errors import AdapterError, LockstepError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.addressing import LoraAddressing, LoraStep
from mstar_tp.lora.checkpoint import AdapterFile, check_adapter_file
from mstar_tp.layers.lora_gemm import laid_out
from mstar_tp.lora.delta_plan import DeltaPlan
from mstar_tp.lora.deltas import LoraLayerDelta
from mstar_tp.lora.slot_weights import SlotWeights
from mstar_tp.lora.spec import ZERO_SLOT, LoraReqConfig, LoraSpec
from mstar_tp.wire.messages import AdapterKey, CopyIn, SlotState

logger = logging.getLogger(__name__)

EARLY_READS = 2
"""Reads that may run for requests whose place in the order is not known yet (R2)."""
WARN_AFTER_S = 10.0

__all__ = ["CopyState", "LoraAdapterPool", "LoraDebugState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDebugState:
    """The pool's tables for an operator."""

    slots: tuple[SlotState, ...]
    tier: tuple[AdapterKey, ...]
    served: tuple[AdapterKey, ...]


class LoraAdapterPool:
    """``decides`` marks the leader's: only there do ask, reserve and the copies' view work.

    ``report`` is called once for each held copy that has landed, on a reader or the main thread, and must not block.
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
    ) -> None:
        self.spec = spec
        self.rank = groups.tp.rank
        self._groups = groups
        self._decides = decides
        self._report = report
        self._lock = threading.Lock()
        device = torch.device(device)
        self.store = LoraAdapterStore(
            spec, self.rank, groups.tp.world_size, device.type == "cuda", dtype
        )
        self.weights = SlotWeights(
            spec,
            rank=self.rank,
            world_size=groups.tp.world_size,
            device=device,
            dtype=dtype,
            make_gemm=laid_out,
        )
        self._registry = AdapterRegistry()
        self._tier = TierMembership(self.store.tier)
        self._table = SlotTable(spec.slots)
        self._copies = CopyTable(groups.tp.world_size)
        self._readers: Readers = (
            ReaderThreads(readers, read_timeout_s, self._land)
            if make_readers is None
            else make_readers(self._land)
        )
        self._reads: dict[AdapterKey, Read] = {}
        self._early: dict[AdapterKey, Read] = {}
        self._pinned: dict[AdapterKey, str] = {}
        """adapter -> the digest every rank agreed on at its first install"""
        self._seated: set[int] = set()
        """requests that need nothing more: base rows, and rows that hold their slot"""
        self._dead: dict[int, str] = {}
        self._fresh: list[int] = []
        self._claims: dict[int, AdapterKey] = {}
        self._to_forget: list[AdapterKey] = []
        self._growth = 0
        self.steps_waited_for_read = 0
        self._current: DeltaPlan | None = None
        self._planner = 0
        self._addressing: LoraAddressing | None = None

    # ------------------------------------------------------------------ start, loads and unloads (main)

    def preload(self, configured: Sequence[tuple[AdapterKey, str]]) -> None:
        """Serve the configured adapters and hold the first of them, in config order. Does not wait for reads.

        Raises:
            AdapterError: naming every configured adapter that cannot be served, one a line.
        """
        files: list[tuple[AdapterKey, str, AdapterFile]] = []
        causes: list[str] = []
        for key, path in configured:
            try:
                files.append((key, path, check_adapter_file(self.spec, key.name, path)))
            except AdapterError as error:
                causes.append(str(error))
        if causes:
            raise AdapterError("\n".join(causes))
        started: list[CopyIn | None] = []
        with self._lock:
            for key, path, file in files:
                self._registry.check(key)
                self._registry.checked(key, file)
                cause = self._registry.commit(key, path)
                assert cause is None, cause
            for key, _, _ in files[: self.spec.cpu_capacity]:
                started += self._apply(self._tier.preload(key))
        self._send(started)

    def load_adapter_async(
        self,
        key: AdapterKey,
        path: str,
        done: Callable[[str | None, int, tuple[str, ...]], None],
    ) -> None:
        """Check a file's header on a reader thread, then call ``done(cause, rank, targets)`` there. Keeps no copy."""
        with self._lock:
            self._registry.check(key)

        def check() -> None:
            file, cause = None, None
            try:
                file = check_adapter_file(self.spec, key.name, path)
            except Exception as error:  # whatever is wrong with the file refuses this load alone
                cause = describe(error, key)
            with self._lock:
                self._registry.checked(key, file)
            if file is None:
                done(cause, 0, ())
            else:
                done(None, file.rank, file.targets)

        self._readers.call(check)

    def commit_load(self, key: AdapterKey, path: str) -> str | None:
        """From this place in the order requests may name ``key``; or why it is not served after all.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        with self._lock:
            return self._registry.commit(key, path)

    def abort_load(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``: forget it, whether or not its check is over."""
        with self._lock:
            self._registry.abort(key)

    def unload_adapter(self, key: AdapterKey) -> bool:
        """New requests may not name ``key``; it is forgotten once no live request does. Whether it was served."""
        with self._lock:
            served = self._registry.retire(key)
            if served:
                self._forget_if_unused(key)
            return served

    @property
    def has_retired(self) -> bool:
        """Whether ``forget_retired`` has something to forget."""
        return bool(self._to_forget)

    def forget_retired(self) -> None:
        """Forget the slots of what was unloaded: between the same two admits on every rank."""
        with self._lock:
            for key in self._to_forget:
                self._table.forget(key)
            self._to_forget.clear()

    # ------------------------------------------------------------------ requests (main)

    def ingest_request(self, rid: int, config: LoraReqConfig) -> str | None:
        """Open a request; why it can never run, or None. Idempotent."""
        key = config.adapter
        started: list[CopyIn | None] = []
        with self._lock:
            if rid in self._seated or rid in self._dead or self._tier.key_of(rid) is not None:
                return self._dead.get(rid)
            if key is None:
                self._seated.add(rid)
            elif not self._registry.served(key):
                self._dead[rid] = f"adapter {key.name!r} is not served: it was unloaded"
            else:
                started = self._apply(self._tier.ingest(rid, key))
        self._send(started)
        return self._dead.get(rid)

    def remove_request(self, rid: int) -> None:
        """Close a request: its slot hold, its claim, its place in the tier's order. Unknown: a no-op. Fenced (R3)."""
        started: list[CopyIn | None] = []
        with self._lock:
            key = self._tier.key_of(rid)
            self._seated.discard(rid)
            self._dead.pop(rid, None)
            if self._claims.pop(rid, None) is not None:
                self._growth += 1
            self._table.release(rid)
            if key is not None:
                started = self._apply(self._tier.remove(rid))
                self._forget_if_unused(key)
        self._send(started)

    def early_read(self, key: AdapterKey) -> None:
        """A body that is not ordered yet names ``key``: maybe start its read, and nothing else (R2)."""
        with self._lock:
            file = self._registry.file(key)
            room = self.spec.cpu_capacity - len(self.store.tier) - len(self._early)
            if file is None or key in self._reads or key in self._early or room <= 0:
                return
            if len(self._early) == EARLY_READS:
                return
            read = self._early[key] = Read(key, None)
        self._start(read, file)

    def drop_copy(self, key: AdapterKey, hold_no: int) -> None:
        """Some rank could not read hold ``hold_no``: drop it here too; requests waiting on it are spent (R7). Fenced."""
        started: list[CopyIn | None] = []
        with self._lock:
            started = self._apply(self._tier.drop(key, hold_no, self._unreadable(key)))
            self._growth += 1
        self._send(started)

    def waiting_on(self, key: AdapterKey) -> list[int]:
        """Live requests on ``key`` that hold no slot, in ingest order."""
        with self._lock:
            return [rid for rid in self._tier.users(key) if rid not in self._seated]

    def slot_of(self, rid: int) -> int:
        """The slot the request holds; ZERO_SLOT for base rows and before its first admit."""
        with self._lock:
            return self._table.slot_of(rid) or ZERO_SLOT

    # ------------------------------------------------------------------ the leader's view (main, leader)

    def copy_in(self, report: CopyIn) -> str | None:
        """Note one rank's report; the adapter's digest when this report made its copy complete, else None."""
        assert self._decides, "only the leader counts copies"
        with self._lock:
            if not self._copies.report(report):
                return None
            self._growth += 1
            return self._copies.pinned(report.key) if report.cause is None else None

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """Whether the request may join the admission queue: IN, WAITING, or why it never will."""
        with self._lock:
            return self._state(rid)

    def failed_copies(self) -> list[tuple[AdapterKey, int, int, str]]:
        """(adapter, hold number, rank, cause) of failed copies in no slot: each is for one ordered DropCopy.

        Each is returned once.
        """
        with self._lock:
            failed = [f for f in self._copies.take_failures() if self._table.resident(f[0]) is None]
            for key, _, _, _ in failed:
                self._copies.announce(key)
            return failed

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """None for base rows and rows that have a claim or a slot, the failure of a lost adapter, else ASKS."""
        with self._lock:
            if rid in self._claims or rid in self._seated:
                return None
            state = self._state(rid)
            return state if isinstance(state, AskFailed) else Ask.ASKS

    def try_reserve(self, rid: int) -> bool:
        """Claim a slot's worth for the row's adapter, counted once an adapter; False while its copy is not in
        everywhere or the slots are spoken for."""
        assert self._decides, "only the leader reserves"
        with self._lock:
            key = self._tier.key_of(rid)
            assert key is not None, f"request {rid} reserves a slot without an adapter"
            if self._state(rid) is not CopyState.IN:
                return False
            if len({key, *self._claims.values(), *self._table.held_keys()}) > self.spec.slots:
                return False
            self._claims[rid] = key
            return True

    def unreserve(self, rid: int) -> None:
        """Forget the claim of a row that holds no slot yet; a no-op else."""
        with self._lock:
            if rid not in self._seated and self._claims.pop(rid, None) is not None:
                self._growth += 1

    def growth_mark(self) -> int:
        """Moves when a waiting head should be retried: a claim ended, a copy settled, an adapter was evicted."""
        return self._growth

    # ------------------------------------------------------------------ steps (step thread)

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Give every row of the step its adapter's slot. Collective on the block's CPU twin when some adapter is in
        no slot; with all rows seated it is one set check.

        Raises:
            LockstepError: the ranks are in different admits, or miss different adapters.
        """
        self._fresh = []
        self._table.tick()
        if self._seated.issuperset([row.rid for row in step.rows]):
            return AdmitOutcome()
        return self._admit(step)

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back the slots this admit took; an adapter it installed stays resident, unheld."""
        with self._lock:
            for rid in self._fresh:
                self._table.release(rid)
                self._seated.discard(rid)
        self._fresh = []
        self._clear_plan()

    def plan(self, step: StepBatch) -> LoraAddressing | None:
        """Lay the step out for its deltas; None when no row has an adapter. Current until the step ends."""
        lora_step = LoraStep(tuple((row.rid, row.num_tokens) for row in step.rows))
        slots = [self._table.slot_of(rid) or ZERO_SLOT for rid, _ in lora_step.rows]
        counts = [num_tokens for _, num_tokens in lora_step.rows]
        self._current = self.weights.plan(slots, counts)
        self._planner = threading.get_ident()
        if not any(slots):
            return None
        return LoraAddressing.of(slots, counts, self.spec.slots)

    def commit(self, step: StepBatch) -> None:
        """The step ran: nothing of its plan is current any more."""
        self._fresh = []
        self._clear_plan()

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """A forward outside any step on this thread: deltas add nothing; what stood before comes back."""
        before = self._current, self._planner
        self._current, self._planner = DeltaPlan(), threading.get_ident()
        try:
            yield
        finally:
            self._current, self._planner = before

    def current_plan(self) -> DeltaPlan:
        """The plan of the step this thread runs.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        plan = self._current
        if plan is None:
            raise LockstepError(
                f"rank {self.rank}: an adapter delta was called while no step is planned: call it between a "
                "step's plan and its commit, or under base_only()"
            )
        if self._planner != threading.get_ident():
            raise LockstepError(
                f"rank {self.rank}: an adapter delta was called on thread {threading.current_thread().name}, "
                "which did not plan the step that is current"
            )
        return plan

    def layer_delta(self, target: str, layer: int) -> LoraLayerDelta:
        """What a bound module calls: adds this step's deltas of one layer of one target."""
        return LoraLayerDelta(self, self.weights.layer(target, layer))

    # ------------------------------------------------------------------ checks and reports

    def slots_hash(self) -> int:
        """The slot table's running hash; as of the last settled admit when read between steps."""
        with self._lock:
            return self._table.hash()

    def tier_hash(self) -> int:
        """The tier membership's running hash. Main."""
        return self.store.tier.hash()

    def debug_state(self) -> LoraDebugState:
        """Slots with holders, the tier's members and the served names. Between steps."""
        with self._lock:
            slots = tuple(
                SlotState(slot=slot, adapter=key, holders=holders)
                for slot, key, holders in self._table.rows()
            )
            return LoraDebugState(
                slots=slots, tier=tuple(self.store.tier.keys()), served=tuple(self._registry.keys())
            )

    def post_warmup_validate(self) -> None:
        """After warm-up no slot is held and no request is known.

        Raises:
            LockstepError: naming what is left.
        """
        held = {slot: holders for slot, _, holders in self._table.rows() if holders}
        if held or self._seated or self._claims:
            raise LockstepError(
                f"rank {self.rank}: warm-up left slots {held}, seated requests {sorted(self._seated)} and "
                f"claims {sorted(self._claims)}"
            )

    def close(self) -> None:
        """Stop the readers. Reads under way end by themselves and land nowhere."""
        self._readers.close()
        with self._lock:
            reads = [*self._reads.values(), *self._early.values()]
        for read in reads:
            self._land(read, None, f"rank {self.rank} is shutting down")

    # ------------------------------------------------------------------ inside

    def _admit(self, step: StepBatch) -> AdmitOutcome:
        failed: dict[int, str] = {}
        waiting: dict[AdapterKey, list[int]] = {}
        with self._lock:
            self._seat_residents(step, failed, waiting)
            victims = self._table.victims()
            misses, reads = self._look_up(waiting)
        if not misses:
            return AdmitOutcome(failed=failed)
        verdicts = self._agree(step, misses)
        failed |= self._bury(verdicts, waiting)
        alive = {key: reads[key] for key, verdict in verdicts.items() if verdict.survives}
        if len(alive) > len(victims):
            return AdmitOutcome(
                failed=failed,
                refused=f"step {step.tp_seq} needs {len(alive)} slots for new adapters, {len(victims)} are "
                "free to take: planned again",
            )
        places = dict(zip(alive, victims, strict=False))
        if any(verdicts[key].state is CopyState.WAITING for key in alive):
            failed |= self._wait_and_agree(step, alive, waiting, places)
        self._install(places, alive, waiting)
        return AdmitOutcome(failed=failed)

    def _seat_residents(
        self, step: StepBatch, failed: dict[int, str], waiting: dict[AdapterKey, list[int]]
    ) -> None:
        """Rows whose adapter is resident take its slot before any victim is picked; the others are misses."""
        for row in step.rows:
            if row.rid in self._seated:
                continue
            if row.rid in self._dead:
                failed[row.rid] = self._dead[row.rid]
                continue
            key = self._tier.key_of(row.rid)
            assert key is not None, f"step {step.tp_seq} names request {row.rid}, which is not open"
            slot = self._table.resident(key)
            if slot is None:
                waiting.setdefault(key, []).append(row.rid)
            else:
                self._seat(row.rid, slot)

    def _seat(self, rid: int, slot: int) -> None:
        self._table.take(rid, slot)
        self._seated.add(rid)
        self._fresh.append(rid)

    def _look_up(
        self, waiting: dict[AdapterKey, list[int]]
    ) -> tuple[list[Miss], dict[AdapterKey, Read | None]]:
        reads = {key: self._reads.get(key) for key in waiting}
        return [_miss(key, read) for key, read in reads.items()], reads

    def _agree(self, step: StepBatch, misses: list[Miss]) -> dict[AdapterKey, ballot.Verdict]:
        votes = ballot.cast(step.tp_seq, misses, self.spec.slots)
        agreed = self._groups.agree(votes)
        verdicts = ballot.count(step.tp_seq, misses, agreed, self.rank)
        return {miss.key: verdict for miss, verdict in zip(misses, verdicts, strict=True)}

    def _bury(
        self,
        verdicts: dict[AdapterKey, ballot.Verdict],
        waiting: dict[AdapterKey, list[int]],
    ) -> dict[int, str]:
        """Rows of adapters that failed anywhere are dead on every rank, before any slot is handed out."""
        failed: dict[int, str] = {}
        with self._lock:
            for key, verdict in verdicts.items():
                if verdict.survives:
                    continue
                cause = self._cause(key, verdict)
                for rid in waiting[key]:
                    failed[rid] = self._dead[rid] = cause
        return failed

    def _cause(self, key: AdapterKey, verdict: ballot.Verdict) -> str:
        if not verdict.same:
            return f"adapter {key.name!r} has other weights on another rank: make its files equal and load it again"
        read = self._reads.get(key)
        if read is not None and read.cause is not None:
            return f"adapter {key.name!r} could not be read on rank {self.rank}: {read.cause}"
        return self._unreadable(key)

    def _unreadable(self, key: AdapterKey) -> str:
        """Which rank could not read the adapter and why, as far as this rank knows."""
        failure = self._copies.failure(key)
        if failure is None:
            return f"adapter {key.name!r} could not be read on some rank"
        return f"adapter {key.name!r} could not be read on rank {failure[0]}: {failure[1]}"

    def _wait_and_agree(
        self,
        step: StepBatch,
        alive: dict[AdapterKey, Read | None],
        waiting: dict[AdapterKey, list[int]],
        places: dict[AdapterKey, int],
    ) -> dict[int, str]:
        """Some rank still reads a survivor: all wait for their own copies, and all agree once more. One that fails
        now leaves its victim resident; no survivor's slot changes."""
        self.steps_waited_for_read += 1
        for key, read in alive.items():
            while read is not None and not read.done.wait(WARN_AFTER_S):
                logger.warning(
                    "rank %d: step %d waits for the read of adapter %s", self.rank, step.tp_seq, key
                )
        with self._lock:
            misses = [_miss(key, read) for key, read in alive.items()]
        verdicts = self._agree(step, misses)
        if any(verdict.state is CopyState.WAITING for verdict in verdicts.values()):
            raise LockstepError(
                f"step {step.tp_seq}: a copy is still being read after every rank waited"
            )
        for key, verdict in verdicts.items():
            if not verdict.survives:
                del places[key]
        return self._bury(verdicts, waiting)

    def _install(
        self,
        places: dict[AdapterKey, int],
        alive: dict[AdapterKey, Read | None],
        waiting: dict[AdapterKey, list[int]],
    ) -> None:
        """Survivors' weights into their victims' slots, in row order; then their rows are seated."""
        copies: list[tuple[int, LoadedAdapter]] = []
        with self._lock:
            for key, slot in places.items():
                read = alive[key]
                assert read is not None and read.adapter is not None
                copies.append((slot, read.adapter))
                self._pinned.setdefault(key, read.adapter.digest)
                if self._table.install(slot, key) is not None:
                    self._growth += 1
        self.weights.install(copies)
        with self._lock:
            for key, slot in places.items():
                for rid in waiting[key]:
                    self._seat(rid, slot)

    def _state(self, rid: int) -> CopyState | AskFailed:
        """A request's copies as the leader sees them. Under the lock."""
        if rid in self._dead:
            return AskFailed(self._dead[rid])
        key = self._tier.key_of(rid)
        if key is None or rid in self._seated:
            return CopyState.IN
        spent = self._tier.spent(rid)
        if spent is not None:
            return AskFailed(spent)
        if self._copies.failure(key) is not None:
            resident = self._table.resident(key) is not None
            return CopyState.IN if resident else AskFailed(self._unreadable(key))
        ready = self._copies.all_in(key) and self._tier.keeps(key)
        return CopyState.IN if ready else CopyState.WAITING

    def _apply(self, changes: Changes) -> list[CopyIn | None]:
        """Make the tier's contents follow its membership; reports of copies that were in early. Under the lock."""
        for key in changes.dropped:
            self._reads.pop(key, None)
            self.store.discard(key)
            self._copies.close(key)
        reports = [self._begin(key, hold_no) for key, hold_no in changes.new]
        room = self.spec.cpu_capacity - len(self.store.tier)
        while len(self._early) > max(0, room):
            del self._early[next(iter(self._early))]
        return reports

    def _begin(self, key: AdapterKey, hold_no: int) -> CopyIn | None:
        """The copy of a new hold: an early read's, or a read of its own. Under the lock."""
        if self._decides:
            self._copies.open(key, hold_no)
        read = self._early.pop(key, None)
        if read is not None and read.cause is None:
            read.hold_no = hold_no
            self._reads[key] = read
            return self._settle(read) if read.settled else None
        read = self._reads[key] = Read(key, hold_no)
        file = self._registry.file(key)
        assert file is not None, f"{key} is held, but not registered"
        self._start(read, file)
        return None

    def _start(self, read: Read, file: AdapterFile) -> None:
        digest = self._pinned.get(read.key)
        self._readers.start(read, lambda: self.store.read(read.key, file, digest))

    def _land(self, read: Read, adapter: LoadedAdapter | None, cause: str | None) -> None:
        """A read has ended: its copy, its report and its waiters, all here. Reader (or deadline) thread."""
        report = None
        with self._lock:
            if not read.settled:
                read.settled, read.adapter, read.cause = True, adapter, cause
                report = self._settle(read)
        read.done.set()
        self._send([report])

    def _settle(self, read: Read) -> CopyIn | None:
        """Keep a settled read's copy if its hold still stands, and say so. Under the lock."""
        if read.hold_no is None or self.store.tier.number(read.key) != read.hold_no:
            return None
        if read.adapter is not None:
            self.store.put(read.adapter, read.hold_no)
        return CopyIn(
            rank=self.rank,
            key=read.key,
            hold_no=read.hold_no,
            digest=read.adapter.digest if read.adapter is not None else None,
            cause=read.cause,
        )

    def _send(self, reports: Sequence[CopyIn | None]) -> None:
        for report in reports:
            if report is not None:
                self._report(report)

    def _forget_if_unused(self, key: AdapterKey) -> None:
        """An unloaded adapter no live request names: its copy goes now, its slot's name before the next step."""
        if not self._registry.retiring(key) or self._tier.named(key):
            return
        self._apply(self._tier.forget(key))
        self._early.pop(key, None)
        self._copies.forget(key)
        self._pinned.pop(key, None)
        self._registry.forget(key)
        self._to_forget.append(key)

    def _clear_plan(self) -> None:
        self._current = None


def _miss(key: AdapterKey, read: Read | None) -> Miss:
    """This rank's state of one missing adapter's copy. Under the pool's lock."""
    if read is None:
        return Miss(key, CopyState.FAILED, None)
    if not read.settled:
        return Miss(key, CopyState.WAITING, None)
    if read.adapter is None:
        return Miss(key, CopyState.FAILED, None)
    return Miss(key, CopyState.IN, read.adapter.digest)
