"""Ranks given one order keep the same tables, however their reads land and fail; and a brute-force
pool foretells each of their decisions.

Reads land per rank, in any order, before, while or after a step wants them; some fail on one rank.
The machine plays the leader as the rules demand (only rows whose claim was granted enter a step)
and also as they forbid (a step that names a row too early), which must still leave every rank
alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from brute_pool import BrutePool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.pool_kit import PoolRanks

from mstar_tp.engine.resources.base import Ask, AskFailed
from mstar_tp.engine.resources.lora.pool import CopyState
from mstar_tp.wire.adapter_limits import AdapterLimits
from mstar_tp.wire.values import AdapterKey

NAMES = ("a", "bb", "ccc", "dddd", "unequal")
KEYS = st.integers(0, len(NAMES) - 1)
RANKS = st.integers(0, 3)
Failed = CopyState.FAILED


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        world_size=st.sampled_from([2, 2, 4]), slots=st.integers(1, 3), spare=st.integers(0, 1)
    )
    def start(self, world_size: int, slots: int, spare: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ranks = PoolRanks(
            Path(self.folder.name), world_size, slots=slots, cpu_capacity=slots + spare
        )
        self.model = BrutePool(slots, slots + spare)
        values = [0.5 + 0.1 * (rank == 1) for rank in range(world_size)]
        self.keys = [*self.ranks.serve(*NAMES[:4]), *self.ranks.serve(NAMES[4], values=values)]
        for key in self.keys:
            self.model.serve(key)
        self.landed: list[dict[AdapterKey, CopyState]] = [{} for _ in range(world_size)]
        self.live: dict[int, AdapterKey | None] = {}
        self.running: set[int] = set()
        self.claimed: dict[int, AdapterKey] = {}
        self.next_rid = 0
        self.generation = 1

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.close()
            self.folder.cleanup()

    # ------------------------------------------------------------------ what is known of copies

    def state(self, rank: int, key: AdapterKey) -> CopyState:
        """How far the present hold's copy is on one rank."""
        if key not in self.model.held():
            return CopyState.FAILED
        if key in self.ranks.readers[rank].waiting:
            return CopyState.WAITING
        return self.landed[rank][key]

    def agreed(self, key: AdapterKey) -> CopyState:
        """What the ranks' agreement says of it now."""
        states = [self.state(rank, key) for rank in range(len(self.landed))]
        differ = key.name == "unequal" and states[1] is CopyState.IN
        if differ and any(s is CopyState.IN for r, s in enumerate(states) if r != 1):
            return CopyState.FAILED
        return min(states)

    def expected(self, rid: int) -> CopyState:
        """What the leader says of a request."""
        key = self.live[rid]
        if rid in self.model.dead:
            return CopyState.FAILED
        if key is None or rid in self.running:
            return CopyState.IN
        if rid in self.model.failed_cause:
            return CopyState.FAILED
        state = self.agreed(key) if key in self.model.held() else CopyState.WAITING
        if state is CopyState.FAILED:
            return CopyState.IN if key in self.model.keys else CopyState.FAILED
        return state if key in self.model.kept() else CopyState.WAITING

    # ------------------------------------------------------------------ main threads

    @rule(
        indices=st.lists(st.integers(0, len(NAMES)), min_size=1, max_size=4),
        early=st.booleans(),
        rank=RANKS,
    )
    def open(self, indices: list[int], early: bool, rank: int) -> None:
        for index in indices:
            key = None if index == len(NAMES) else self.keys[index]
            if key is not None and early:
                self.ranks.pools[rank % len(self.ranks.pools)].fetches.read_early(key)
            self.ranks.open(self.next_rid, key)
            self.model.ingest(self.next_rid, key)
            self.live[self.next_rid] = key
            self.next_rid += 1
        self.ranks.deliver()

    @rule(rank=RANKS, index=KEYS, fails=st.sampled_from([False] * 4 + [True]))
    def land(self, rank: int, index: int, fails: bool) -> None:
        self._land(rank % len(self.landed), self.keys[index], fails)

    def _land(self, rank: int, key: AdapterKey, fails: bool) -> None:
        if key in self.ranks.readers[rank].waiting:
            self.landed[rank][key] = CopyState.FAILED if fails else CopyState.IN
            self.ranks.land(key, only=rank, error="broken" if fails else None)

    @rule(keys=st.sets(KEYS, min_size=2), admit=st.booleans())
    def land_all(self, keys: set[int], admit: bool) -> None:
        for index in sorted(keys):
            for rank in range(len(self.landed)):
                self._land(rank, self.keys[index], False)
        if admit:
            self.admit_what_may_run()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.ranks.remove(rid)
        self.model.remove(rid)
        del self.live[rid]
        self.running.discard(rid)
        self.claimed.pop(rid, None)
        self.ranks.deliver()

    @rule()
    def drop_failed(self) -> None:
        held = dict(self.model.cpu_cache)
        failed = {key for key in held if self.agreed(key) is Failed and key not in self.model.keys}
        dropped = self.ranks.drop_failed()
        assert {(key, fetch_no) for key, fetch_no, _, _ in dropped} == {
            (k, held[k]) for k in failed
        }
        for key, fetch_no, _, _ in dropped:
            self.model.drop(key, fetch_no)
        self.ranks.deliver()

    @rule(index=KEYS, pinned=st.booleans())
    def unload_and_load_anew(self, index: int, pinned: bool) -> None:
        """The name comes back at once, as another generation, pinned where a slot is left for the
        others.
        """
        old = self.keys[index]
        self.generation += 1
        new = self.keys[index] = AdapterKey(old.name, self.generation)
        self.model.unload(old)
        may = self.model.may_pin()
        limits = AdapterLimits(pinned=pinned and may)
        for rank, pool in enumerate(self.ranks.pools):
            path = str(self.ranks.folder / f"{old.name}-{rank}")
            assert pool.loads.unload(old)
            pool.loads.begin(new, path, lambda *_: None)
            why = pool.loads.over_capacity(new, AdapterLimits(pinned=pinned))
            assert (why is not None) == (pinned and not may)
            assert pool.loads.commit(new, path, limits=limits) is None
        self.model.serve(new, pinned and may)
        self.ranks.deliver()

    @rule()
    def forget_retired(self) -> None:
        for pool in self.ranks.pools:
            pool.loads.forget()
        self.model.forget_retired()

    # ------------------------------------------------------------------ steps

    @rule()
    def admit_what_may_run(self) -> None:
        """The leader's way: claims first, in arrival order. Such a step never waits, and fails a
        row only whose re-read failed and whose slot this step's own misses took.
        """
        leader = self.ranks.leader
        if self.model.to_unpin:  # the leader orders that before any further step
            self.forget_retired()
        joining = []
        for rid in self.waiting():
            answer = leader.ask(rid)
            if answer is None:
                joining.append(rid)
            elif answer is Ask.ASKS:
                fits = self.fits(rid)
                assert (leader.reserve(rid) is not None) == fits
                if fits:
                    self.claimed[rid] = self.live[rid]  # type: ignore[assignment]
                    joining.append(rid)
        waited = leader.reports.steps_waited_for_read
        outcome_failed, refused = self._admit(joining, ())
        assert not refused and leader.reports.steps_waited_for_read == waited
        assert all(rid in joining for rid in outcome_failed)

    def fits(self, rid: int) -> bool:
        """Whether the slots hold one adapter more, counting each that runs, is claimed or is pinned
        once.
        """
        held = {
            key
            for key, holders in zip(self.model.keys, self.model.holders, strict=True)
            if holders and isinstance(key, AdapterKey)
        }
        spoken_for = held | set(self.claimed.values())
        if self.live[rid] in spoken_for:
            return True
        claimed: set[AdapterKey | None] = {self.live[rid], *spoken_for}
        claimed |= {key for key in self.model.pins if isinstance(key, AdapterKey)}
        return len(claimed) <= len(self.model.keys)

    @precondition(lambda self: self.waiting())
    @rule(
        data=st.data(),
        lands=st.permutations([(rank, index) for rank in range(4) for index in range(5)]),
        broken=st.sets(st.tuples(RANKS, KEYS), max_size=2),
    )
    def admit_too_early(
        self, data: st.DataObject, lands: list[tuple[int, int]], broken: set[tuple[int, int]]
    ) -> None:
        """A step may name rows whose copies are anything; reads land, or break, while the admit
        waits.
        """
        rids = data.draw(st.lists(st.sampled_from(self.waiting()), min_size=1, unique=True))
        self._admit(
            rids,
            [(r, self.keys[i], (r, i) in broken) for r, i in lands if r < len(self.landed)],
        )

    def _admit(
        self, joining: list[int], lands: Collection[tuple[int, AdapterKey, bool]]
    ) -> tuple[set[int], bool]:
        """Admit, and check all that was foretold; failed rows, and whether it was refused."""
        rows = [(rid, self.live[rid]) for rid in (*sorted(self.running), *joining)]
        wanted = {key for _, key in rows if key is not None}
        before = {key: self.agreed(key) for key in wanted}
        bad = {key for key, state in before.items() if state is CopyState.FAILED}

        def land() -> None:
            for rank, key, fails in lands:
                self._land(rank, key, fails)
            for key in wanted:  # whatever is unloaded meanwhile, a read that a row waits for ends
                for rank in range(len(self.landed)):
                    self._land(rank, key, False)

        if any(state is CopyState.WAITING for state in before.values()):
            outcome = self.ranks.admit_then([rid for rid, _ in rows], land)
        else:
            outcome = self.ranks.admit(*(rid for rid, _ in rows))
        late = {key for key in wanted - bad if self.agreed(key) is CopyState.FAILED}
        failed, refused = self.model.admit(rows, bad, late)
        assert (set(outcome.failed), outcome.refused is not None) == (failed, refused)
        if refused:
            for pool in self.ranks.pools:
                pool.rollback_admit(self.ranks.step())
            self.model.rollback()
            for rid in joining:
                self.ranks.leader.unreserve(rid)
                self.claimed.pop(rid, None)
        else:
            self.running |= set(joining) - failed
        return failed, refused

    def waiting(self) -> list[int]:
        """Live rows that neither run nor are dead, in arrival order."""
        gone = self.model.dead | self.running
        return [rid for rid in sorted(self.live) if rid not in gone]

    @invariant()
    def ranks_are_as_foretold(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self.ranks.check()
        for pool in self.ranks.pools:
            assert pool.tables.slots.rows() == self.model.slots()
            assert list(pool.reports.debug_state().cpu_cache) == self.model.held()
            for rid in self.live:
                slots = [i + 1 for i, holders in enumerate(self.model.holders) if rid in holders]
                assert pool.slot_of(rid) == (slots[0] if slots else 0)
        states = {rid: self.ranks.leader.request_state(rid) for rid in self.live}
        for rid, state in states.items():
            found = CopyState.FAILED if isinstance(state, AskFailed) else state
            assert found is self.expected(rid), f"request {rid} on {self.live[rid]}"
        on_adapters = [rid for rid in self.waiting() if self.live[rid] is not None]
        settled = self.ranks.leader.settled(on_adapters)
        assert dict(settled) == {
            rid: states[rid] for rid in on_adapters if states[rid] is not CopyState.WAITING
        }


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
