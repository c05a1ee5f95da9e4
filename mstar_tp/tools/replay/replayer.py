"""One rank's tables, rebuilt step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from mstar_tp.common.errors import MstarError, RecordingError
from mstar_tp.engine.checks import SCHEDULE_TABLES, TABLES
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload, NoCopies
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.resources.lora.stage import PoolStage
from mstar_tp.engine.scheduling.requests import NO_TOKEN, RequestTable
from mstar_tp.engine.step.step_tables import StepTables
from mstar_tp.engine.table_rows import Row
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.recording.entries import LoraSizes, Opened, Ran
from mstar_tp.tools.replay.fakes import (
    NoWeights,
    RecordedGroup,
    RecordedNames,
    RecordedReads,
    RecordedStore,
)
from mstar_tp.tools.replay.script import OrderedEntry, Script
from mstar_tp.wire.adapter_limits import AdapterLimits
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import Advance, DropCopy, Forget, Preempt, Remove, ScheduleEntry, Step
from mstar_tp.wire.values import ImageInput, SamplingParams
from mstar_tp.worker.state import RankState

if TYPE_CHECKING:
    import torch

    from mstar_tp.distributed.comm import JointGroups

A_TOKEN, LAST_TOKEN = 0, 1
"""Stand for tokens, which are not recorded: one that goes on, one that ends its request."""
AN_IMAGE = ImageInput(start=0, num_tokens=1, pixels=b"")
"""Stands for all that a request had: tables know only whether it had any."""
_PARAMS = SamplingParams(max_tokens=1 << 40, stop_token_ids=(LAST_TOKEN,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step as it begins: what was applied since the one before it, and its tables' hashes.

    ``rebuilt`` are those of the rebuilt tables, ``recorded`` those that the rank computed itself:
    where they differ, the rank's table was not what the order makes of it. Tokens are not recorded,
    so their hash cannot be rebuilt.
    """

    step: Step
    since: tuple[OrderedEntry, ...]
    copies: tuple[CopyIn, ...]
    """Reports of copies that the leader took since then; none on a follower."""
    rebuilt: dict[str, int]
    recorded: dict[str, int]
    agreed: tuple[tuple[int, ...], ...]
    ran: Ran | None
    """The step's end; None when the recording ends first."""

    @property
    def departed(self) -> str | None:
        """The first table that was not what the order makes of it, or None."""
        return next((t for t, h in self.rebuilt.items() if self.recorded.get(t, h) != h), None)

    @property
    def split(self) -> str | None:
        """The first table that was not the leader's, going by the hashes its step carries."""
        leaders = {table: getattr(self.step.checks, table) for table in TABLES}
        return next((t for t, h in leaders.items() if self.recorded.get(t, h) != h), None)


class Replayer:
    """Applies a script: ``advance`` to the next step, look at the tables, ``run`` it, and so on."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._ordered = iter(script.ordered)
        self.since: list[OrderedEntry] = []
        """What was applied since the last step."""
        self._copies: list[CopyIn] = []
        self._place = "before the first step"
        self._rebuilt: tuple[str, ...] = tuple(t for t in TABLES if t != "tokens")
        """The tables that are as they were then."""
        start = script.recording.start
        self._group = RecordedGroup(start.rank, start.world_size)
        requests = RequestTable()
        table = PageTable(start.num_pages, start.page_size)
        offload = KvOffload(HostPages(start.num_host_pages), NoCopies())
        names = None
        if start.prefix_caching:
            names = RecordedNames(requests, start.page_size, script.named)
        kv = KvPool(table, lambda rid: len(requests[rid].tokens), offload, names)
        self._reads: list[RecordedReads] = []
        pools = [self._pool(number, sizes) for number, sizes in enumerate(start.lora)]
        self._lora = lora = LoraPools(pools) if pools else None
        self._tables = StepTables(requests, (*pools, kv), deferred=start.deferred)
        self.state = RankState(start.rank, requests, kv, lora, lambda report: None)

    def rows(self) -> dict[str, tuple[Row, ...]]:
        """Every table as it is now."""
        return {table: self.state.table_rows(table) for table in TABLES}

    def advance(self) -> Replayed | None:
        """Apply all that stands before the next step; None when no other follows.

        Raises:
            RecordingError: the entries contradict each other.
        """
        self.since, self._copies = [], []
        for entry in self._ordered:
            if isinstance(entry, Step):
                self._check_place(entry)
                return self._begin(entry)
            with self._readable():
                self._apply(entry)
        return None

    def run(self, replayed: Replayed) -> None:
        """Admit and commit the step that ``advance`` gave.

        Raises:
            RecordingError: it does not end in the recording, or cannot have ended so.
        """
        ran, step = replayed.ran, replayed.step
        self._place = f"in step {step.tp_seq}"
        if ran is None:
            raise RecordingError(
                f"{self.script.recording.path}: step {step.tp_seq} does not end in it"
            )
        self._group.answers.extend(replayed.agreed)
        with self._readable():
            for reads in self._reads:
                reads.land_all()
            admitted = self._tables.admit(step)
            if (admitted.refused is not None) != ran.refused:
                raise RecordingError(f"its admit was refused then: {ran.refused}")
            self._tables.settle(step)
            if admitted.refused is not None or not admitted.step.rows:
                self._tables.clear(admitted.step)
            else:
                tokens = [_token(row.rid, ran) for row in admitted.step.rows if row.samples]
                self._tables.commit(admitted.step, tokens)
            if self._group.answers:
                raise RecordingError("it holds more agreements than the step asks for")
        self._place = f"after step {step.tp_seq}"

    def skip(self) -> None:
        """Go on without the step that ``advance`` gave: its end is not in the recording.

        The tables that the schedule alone decides are still rebuilt.
        """
        self._rebuilt = SCHEDULE_TABLES

    # ------------------------------------------------------------------ inside

    def _pool(self, number: int, sizes: LoraSizes) -> LoraAdapterPool:
        spec = LoraSpec(
            targets=(),
            slots=sizes.slots,
            max_rank=1,
            cpu_capacity=sizes.cpu_capacity,
            cpu_unit=sizes.cpu_unit,
            dtype="none",
        )
        script = self.script
        context = PoolContext(
            weights=NoWeights(),
            store=RecordedStore(
                spec, script.costs[number], script.untouched[number], script.over_capacity[number]
            ),
            stage=PoolStage(
                number=number, name=sizes.stage, image_tokens=1 if sizes.of_images else None
            ),
        )
        pool = LoraAdapterPool(
            spec,
            device="none",
            groups=cast("JointGroups", self._group),
            dtype=cast("torch.dtype", None),
            decides=self._group.rank == 0,
            report=lambda report: None,
            make_readers=partial(self._make_reads, number),
            context=context,
        )
        pool.loads.preload(
            [(key, key.name) for key in sizes.adapters],
            limits=dict.fromkeys(sizes.pinned, AdapterLimits(pinned=True)),
        )
        return pool

    def _make_reads(self, stage: int, land: Land) -> RecordedReads:
        reads = RecordedReads(land, self.script.copies[stage])
        self._reads.append(reads)
        return reads

    def _begin(self, step: Step) -> Replayed:
        checks = self.state.checks()
        script, tp_seq = self.script, step.tp_seq
        return Replayed(
            step=step,
            since=tuple(self.since),
            copies=tuple(self._copies),
            rebuilt={table: getattr(checks, table) for table in self._rebuilt},
            recorded=script.hashes(step),
            agreed=tuple(script.agreed.get(tp_seq, ())),
            ran=script.ran.get(tp_seq),
        )

    def _apply(self, entry: OrderedEntry | CopyIn) -> None:
        if isinstance(entry, CopyIn):
            self._copies.append(entry)
            if self._lora is not None:
                self._lora.copy_in(entry)
            return
        self.since.append(entry)
        if isinstance(entry, ScheduleEntry):
            self._check_place(entry)
        match entry:
            case Opened():
                self.state.apply(
                    NewRequest(
                        rid=entry.rid,
                        prompt=(A_TOKEN,) * entry.num_prompt,
                        params=_PARAMS,
                        adapter=entry.adapter,
                        output=(A_TOKEN,) * entry.num_output,
                        images=(AN_IMAGE,) if entry.has_images else (),
                    )
                )
            case Remove():
                self.state.remove(entry.rid)
            case Preempt():
                self.state.preempt(entry.rid, offload=entry.offload)
            case DropCopy():
                self.state.drop_copy(entry)
            case Forget():
                self.state.forget_retired()
            case Step() | Advance():
                pass
            case _:
                self.state.apply(entry)

    def _check_place(self, entry: ScheduleEntry) -> None:
        """A rank applies an entry after exactly the messages it names (R1)."""
        if entry.ingested != self.state.ingested:
            raise RecordingError(
                f"{self.script.recording.path}: {self._place}: {type(entry).__name__} stands after "
                f"{self.state.ingested} conductor messages, wanted {entry.ingested}"
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn a refusal of the tables into an error of the recording, which contradicts itself."""
        try:
            yield
        except (MstarError, AssertionError, KeyError, IndexError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RecordingError(f"{self.script.recording.path}: {self._place}: {said}") from error


def _token(rid: int, ran: Ran) -> int:
    if rid in ran.failed:
        return NO_TOKEN
    return LAST_TOKEN if rid in ran.ended else A_TOKEN
