"""The model of the lockstep protocol does what the product does: real pools are taken through
interleavings of the model, and every table is compared after every transition.

The pools are whole, but for a device, files and the group's agreement: a copy is a name, a read
lands when the model says so, and an admit waits in its agreement until the model's is over.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue
from random import Random
from typing import Any, NamedTuple

import pytest
from model import Label, Model, State
from model_cases import FULL, SMALL, TESTED
from model_config import FAILED, IN, OTHER, READING, Config, bits
from model_leader import Leader
from model_state import LAUNCHED, VOTED, Rank, Step

from mstar_tp.engine.resources.base import AdmitOutcome, AskFailed, StepBatch, StepRow
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.tools.replay.fakes import NoWeights, RecordedStore
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

WAIT_S = 60.0
CAUSE = "the file is gone"


class _Group(NamedTuple):
    rank: int
    world_size: int


class _Readers:
    """Reads wait until the model lets them land; header checks pass at once."""

    def __init__(self, land: Land) -> None:
        self._land = land
        self.reads: list[Read] = []

    def start(self, read: Read, work: Any) -> None:
        self.reads.append(read)

    def call(self, key: AdapterKey, work: Any, late: Any) -> None:
        work()

    def close(self) -> None:
        self.reads.clear()

    def land(self, read: Read, outcome: str, rank: int) -> None:
        if outcome == FAILED:
            self._land(read, None, CAUSE)
            return
        digest = f"{read.key}" if outcome == IN else f"{read.key} of rank {rank}"
        adapter = LoadedAdapter(key=read.key, digest=digest, lora_rank=1, scaling={}, a={}, b={})
        self._land(read, adapter, None)


class RealRank:
    """A pool, and its step thread while an admit is under way. It is the ``groups`` of its pool."""

    def __init__(self, config: Config, rank: int, costs: dict[AdapterKey, int]) -> None:
        self.tp = _Group(rank, config.ranks)
        self.reports: list[CopyIn] = []
        self._said: SimpleQueue[list[int] | AdmitOutcome | BaseException] = SimpleQueue()
        self._told: SimpleQueue[list[int]] = SimpleQueue()
        self.votes: list[int] = []
        self.lowest: list[int] = []
        self.tp_seq = -1

        def readers(land: Land) -> _Readers:
            self.readers = _Readers(land)
            return self.readers

        spec = LoraSpec(
            targets=(),
            slots=config.slots,
            max_rank=1,
            cpu_capacity=config.capacity,
            cpu_unit="bytes" if config.costs else "adapters",
            dtype="none",
        )
        self.pool = LoraAdapterPool(
            spec,
            device="none",
            groups=self,  # type: ignore[arg-type]
            dtype=None,  # type: ignore[arg-type]
            decides=rank == 0,
            report=self.reports.append,
            make_readers=readers,
            context=PoolContext(weights=NoWeights(), store=RecordedStore(spec, costs)),
        )

    def agree(self, votes: list[int]) -> list[int]:
        self._said.put(votes)
        return self._told.get(timeout=WAIT_S)

    def begin(self, rows: tuple[int, ...]) -> AdmitOutcome | None:
        """Start an admit: its outcome, or None when it waits in the agreement."""
        self.tp_seq += 1
        batch = StepBatch(
            tp_seq=self.tp_seq,
            rows=tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in rows),
        )

        def admit() -> None:
            try:
                self._said.put(self.pool.admit(batch))
            except BaseException as error:
                self._said.put(error)

        threading.Thread(target=admit, daemon=True).start()
        return self._next()

    def settle(self) -> AdmitOutcome | None:
        """Tell the admit what was agreed, and let it go on."""
        self._told.put(self.lowest)
        return self._next()

    def _next(self) -> AdmitOutcome | None:
        said = self._said.get(timeout=WAIT_S)
        if isinstance(said, BaseException):
            raise said
        if isinstance(said, AdmitOutcome):
            return said
        self.votes = said
        return None


class Walk:
    """The model and the real ranks, side by side."""

    def __init__(self, config: Config) -> None:
        self.model = Model(config)
        self.config = config
        self.keys = [AdapterKey(name, 0) for name in config.names]
        for name, numbers in self.model.conductors.generations.items():
            self.keys += [AdapterKey(name, 1 + index) for index, _ in enumerate(numbers)]
        costs = dict(zip(self.keys, config.costs, strict=False))
        self.ranks = [RealRank(config, rank, costs) for rank in range(config.ranks)]
        for rank, real in enumerate(self.ranks):
            if config.held:
                real.pool.loads.preload([(key, key.name) for key in self.keys[: config.held]])
            for key in range(config.held, len(config.names)):
                self._body(rank, ("load", key))
                self._body(rank, ("commit", key))
        self.state = self.model.start()

    def close(self) -> None:
        for real in self.ranks:
            real.pool.close()

    def go(self, label: Label, after: State) -> None:
        before, self.state = self.state, after
        kind, *rest = label
        getattr(self, f"_{kind.replace(' ', '_')}")(before, *rest)
        self.compare(label)

    def leader_of(self, state: State) -> Leader:
        return self.model.leaders.get(state[1])

    def rank_of(self, state: State, rank: int) -> Rank:
        return self.model.ranks.get(state[4 + rank])

    # ------------------------------------------------------------------ transitions

    def _leader_takes(self, before: State, body: Label) -> None:
        self._body(0, body)
        self._unreserve(before)

    def _leader_notes(self, before: State, report: Label) -> None:
        rank, key, fetch_no, _ = report
        reports = self.ranks[rank].reports
        told = next(r for r in reports if (r.key, r.fetch_no) == (self.keys[key], fetch_no))
        reports.remove(told)
        self.ranks[0].pool.copy_in(told)

    def _leader_turns(self, before: State, items: tuple[Label, ...]) -> None:
        pool, old, new = self.ranks[0].pool, self.leader_of(before), self.leader_of(self.state)
        settled = {rid for rid, _ in pool.settled(bits(old.waiting))}
        assert settled == set(bits(old.waiting)) - set(bits(new.waiting))
        self._unreserve(before)
        drops = [item for item in items if item[0] == "drop"]
        if drops:
            found = [(key, fetch_no) for key, fetch_no, _, _ in pool.failed_copies()]
            assert found == [(self.keys[drop[1]], drop[2]) for drop in drops]
        for item in items:
            if item[0] in ("remove", "drop", "forget"):
                self._entry(0, item)
        for rid in bits(new.claims & ~old.claims):
            assert pool.reserve(rid) is not None

    def _follows(self, before: State, rank: int, item: Label) -> None:
        if item[0] == "body":
            self._body(rank, item[1])
        elif item[0] != "step":
            self._entry(rank, item)

    def _comes_early(self, before: State, rank: int, body: Label) -> None:
        self.ranks[rank].pool.fetches.read_early(self.keys[body[2]])

    def _lands(self, before: State, rank: int, key: int, outcome: str) -> None:
        real = self.ranks[rank]
        held = real.pool.fetches.read_of(self.keys[key])
        early = real.pool.fetches._early.get(self.keys[key])
        read = early if early is not None else held
        assert read is not None and not read.settled
        real.readers.land(read, outcome, rank)

    def _begins(self, before: State, rank: int) -> None:
        step = self.rank_of(self.state, rank).steps[0]
        outcome = self.ranks[rank].begin(step.runs)
        assert (outcome is None) == (step.phase == VOTED)
        self._check_outcome(outcome, step)

    def _all_agree(self, before: State) -> None:
        lowest = list(map(min, zip(*(real.votes for real in self.ranks), strict=True)))
        for real in self.ranks:
            real.lowest = lowest

    def _settles(self, before: State, rank: int) -> None:
        step = self.rank_of(self.state, rank).steps[0]
        outcome = self.ranks[rank].settle()
        assert outcome is not None and step.phase >= LAUNCHED
        self._check_outcome(outcome, step)

    def _all_run(self, before: State) -> None:
        pass

    def _ends(self, before: State, rank: int) -> None:
        self.ranks[rank].pool.commit(StepBatch(tp_seq=self.ranks[rank].tp_seq, rows=()))

    def _check_outcome(self, outcome: AdmitOutcome | None, step: Step) -> None:
        if outcome is not None:
            assert outcome.refused is None and set(outcome.failed) == set(step.failed)

    def _unreserve(self, before: State) -> None:
        """Requests that ended before they were seated give their claims back."""
        gone = self.leader_of(before).claims & ~self.leader_of(self.state).claims
        for rid in bits(gone):
            self.ranks[0].pool.unreserve(rid)

    def _body(self, rank: int, body: Label) -> None:
        pool, (kind, what, *rest) = self.ranks[rank].pool, body
        if kind == "new":
            pool.ingest_request(what, LoraReqConfig(self.keys[rest[0]]))
        elif kind == "unload":
            pool.loads.unload(self.keys[what])
        elif kind == "load":
            causes: list[str | None] = []
            key = self.keys[what]
            pool.loads.begin(key, key.name, lambda cause, *_: causes.append(cause))
            assert causes == [None]
        elif kind == "commit":
            assert pool.loads.commit(self.keys[what], self.keys[what].name) is None

    def _entry(self, rank: int, item: Label) -> None:
        pool = self.ranks[rank].pool
        if item[0] == "remove":
            pool.remove_request(item[1])
        elif item[0] == "drop":
            pool.drop_copy(self.keys[item[1]], item[2], 0, CAUSE)
        else:
            pool.loads.forget()

    # ------------------------------------------------------------------ what both hold

    def compare(self, label: Label) -> None:
        for rank, real in enumerate(self.ranks):
            assert self._real(real) == self._model(rank), (label, rank)
        tables, leader = self.ranks[0].pool.tables, self.leader_of(self.state)
        assert set(tables.claims) == set(bits(leader.claims))
        for key in self.keys:
            assert tables.copies.all_in(key) == self._copies().all_in(self.keys.index(key))
            failed = tables.copies.failure(key) is not None
            assert failed == (self._copies().failure(self.keys.index(key)) is not None)
        told = sorted(self.model.get(self.state[3]))
        assert told == sorted(
            (rank, self.keys.index(report.key), report.fetch_no, self._outcome(rank, report))
            for rank, real in enumerate(self.ranks)
            for report in real.reports
        )

    def _copies(self) -> Any:
        return self.model.ranks.copies.look(self.leader_of(self.state).copies)

    def _outcome(self, rank: int, report: CopyIn) -> str:
        if report.cause is not None:
            return FAILED
        return IN if report.digest == str(report.key) else OTHER

    def _real(self, real: RealRank) -> dict[str, Any]:
        pool, keys = real.pool, self.keys
        tables, cpu_cache = pool.tables, pool.store.cpu_cache
        reads = [pool.fetches.read_of(key) for key in keys]
        return {
            "cpu_cache": [(keys.index(key), cpu_cache.number(key)) for key in cpu_cache.keys()],
            "keep": [keys.index(key) for key in tables.cpu_cache.keep()],
            "slots": [
                (slot, None if key is None else keys.index(key), holders)
                for slot, key, holders in tables.slots.rows()
            ],
            "victims": tables.slots.victims(),
            "assigned": tables.assigned,
            "dead": set(tables.dead),
            "failed": set(tables.cpu_cache.failed_requests()),
            "served": {keys.index(key) for key in tables.registry.keys()},
            "to forget": [keys.index(key) for key in pool.loads.to_forget],
            "reads": [None if read is None else (read.fetch_no, _state(read)) for read in reads],
            "early": [(keys.index(k), _state(read)) for k, read in pool.fetches._early.items()],
        }

    def _model(self, rank: int) -> dict[str, Any]:
        ranks, now = self.model.ranks, self.rank_of(self.state, rank)
        cpu_cache, slots = ranks.cpu_cache.look(now.cpu_cache), ranks.slots.look(now.slots)
        return {
            "cpu_cache": [
                (key, cpu_cache.cpu_cache.number(key)) for key in cpu_cache.cpu_cache.keys()
            ],
            "keep": cpu_cache.keep(),
            "slots": slots.rows(),
            "victims": slots.victims(),
            "assigned": set(bits(now.assigned)),
            "dead": set(bits(now.dead)),
            "failed": set(cpu_cache.failed_requests()),
            "served": set(bits(now.served)),
            "to forget": list(now.to_forget),
            "reads": list(now.reads),
            "early": list(now.early),
        }

    def check_requests(self) -> None:
        """The leader's pool and the model agree on who waits, who may run and who failed."""
        leader = self.leader_of(self.state)
        sight = (leader.copies, *(getattr(self.rank_of(self.state, 0), name) for name in SIGHT))
        pool = self.model.leaders.pool(sight, (), leader.claims)
        for rid in bits(self.rank_of(self.state, 0).open):
            real = self.ranks[0].pool.request_state(rid)
            assert _kind(real) == _kind(pool.request_state(rid))


SIGHT = ("cpu_cache", "slots", "assigned", "dead")


def _kind(answer: CopyState | AskFailed) -> object:
    return AskFailed if isinstance(answer, AskFailed) else answer


def _state(read: Read) -> str:
    if not read.settled:
        return READING
    if read.adapter is None:
        return FAILED
    return IN if read.adapter.digest == str(read.key) else OTHER


CONFIGS = {
    "capacity 1": FULL,
    "capacity 2, slots 2": replace(FULL, capacity=2, slots=2, steps=(2, 1, 1)),
    "one step in flight": replace(FULL, window=1, capacity=2),
    "early reads": replace(FULL, early=True, capacity=2, faults=2),
    "other weights": replace(SMALL, wrong=(FAILED, OTHER), capacity=2, faults=2),
    "3 ranks": replace(FULL, ranks=3, capacity=2, faults=2),
    "costs": TESTED["one that fits past one that does not"],
    "woken": replace(FULL, wakes=True, capacity=2, held=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_real_pools_hold_what_the_model_says(name: str) -> None:
    config = replace(CONFIGS[name], reduce=False)
    ends = 0
    for seed in range(40):
        ends += _walk(config, Random(f"{name} {seed}"))
    assert ends >= 30, "most walks should come to an end"


def _walk(config: Config, random: Random) -> bool:
    """One interleaving; whether it came to an end."""
    walk = Walk(config)
    try:
        walk.compare(("start",))
        for _ in range(400):
            if walk.model.is_done(walk.state):
                return True
            walk.go(*random.choice(walk.model.after(walk.state)))
            walk.check_requests()
        return False
    finally:
        walk.close()
