"""Two ranks that are given the same order keep the same tables, however their reads land and fail.

Reads land per rank, in any order, before, while or after a step wants them; some fail on one rank.
The machine plays the leader as the rules demand (only rows whose claim was granted enter a step)
and also as they forbid (a step that names a row too early), which must still leave every rank
alike.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_kit import PoolRanks

from mstar_tp.engine.resources.base import Ask, AskFailed
from mstar_tp.engine.resources.lora.pool import CopyState
from mstar_tp.wire.messages import AdapterKey


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ranks = PoolRanks(Path(self.folder.name), slots=2, cpu_capacity=3)
        self.keys = self.ranks.serve("a", "bb", "ccc", "dddd")
        self.live: dict[int, AdapterKey | None] = {}
        self.running: set[int] = set()
        self.gone: set[int] = set()
        self.next_rid = 0

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.close()
            self.folder.cleanup()

    @rule(index=st.integers(0, 4), early=st.booleans())
    def open(self, index: int, early: bool) -> None:
        key = None if index == 4 else self.keys[index]
        if key is not None and early:
            self.ranks.pools[1].early_read(key)
        self.ranks.open(self.next_rid, key)
        self.live[self.next_rid] = key
        self.next_rid += 1

    @rule(
        rank=st.integers(0, 1), index=st.integers(0, 3), fails=st.sampled_from([False] * 4 + [True])
    )
    def land(self, rank: int, index: int, fails: bool) -> None:
        self.ranks.land(self.keys[index], only=rank, error="broken" if fails else None)

    @rule(keys=st.sets(st.integers(0, 3), min_size=2))
    def land_all(self, keys: set[int]) -> None:
        for index in sorted(keys):
            self.ranks.land(self.keys[index])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.ranks.remove(rid)
        del self.live[rid]
        self.running.discard(rid)
        self.gone.discard(rid)

    @rule()
    def drop_failed(self) -> None:
        self.ranks.drop_failed()

    @rule()
    def admit_what_may_run(self) -> None:
        """The leader's way: claims first, in arrival order. Such a step never fails a row or
        waits.
        """
        leader = self.ranks.leader
        joining = []
        for rid in self.waiting():
            answer = leader.ask(rid)
            if answer is None or (answer is Ask.ASKS and leader.reserve(rid) is not None):
                joining.append(rid)
        waited = leader.steps_waited_for_read
        outcome = self.ranks.admit(*sorted(self.running), *joining)
        assert outcome.refused is None and leader.steps_waited_for_read == waited
        for rid in outcome.failed:
            # Only a failed re-read of an adapter that this step's misses evicted may fail here.
            assert rid in joining
            self.gone.add(rid)
        self.running |= set(joining) - set(outcome.failed)

    @precondition(lambda self: self.waiting())
    @rule(
        data=st.data(),
        lands=st.permutations([(rank, index) for rank in (0, 1) for index in range(4)]),
        broken=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=2),
    )
    def admit_too_early(
        self, data: st.DataObject, lands: list[tuple[int, int]], broken: set[tuple[int, int]]
    ) -> None:
        """A step may name rows whose copies are anything; reads land, or break, while the admit
        waits.
        """
        rids = data.draw(st.lists(st.sampled_from(self.waiting()), min_size=1, unique=True))

        def land() -> None:
            for rank, index in lands:
                error = "broken" if (rank, index) in broken else None
                self.ranks.land(self.keys[index], only=rank, error=error)

        outcome = self.ranks.admit_then([*sorted(self.running), *rids], land)
        self.gone |= set(outcome.failed)
        if outcome.refused is not None:
            for pool in self.ranks.pools:
                pool.rollback_admit(self.ranks.step())
        else:
            self.running |= set(rids) - set(outcome.failed)

    def waiting(self) -> list[int]:
        """Live rows that neither run nor are dead, in arrival order."""
        return [r for r in sorted(self.live) if r not in self.running and r not in self.gone]

    @invariant()
    def ranks_are_alike_and_within_bounds(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self.ranks.check()
        held = {rid for _, rids in self.ranks.slots().values() for rid in rids}
        assert held == {rid for rid in self.running if self.live[rid] is not None}
        for slot, (name, rids) in self.ranks.slots().items():
            for rid in rids:
                key = self.live[rid]
                assert key is not None and key.name == name
                assert all(pool.slot_of(rid) == slot for pool in self.ranks.pools)
        states = {rid: self.ranks.leader.request_state(rid) for rid in self.waiting()}
        settled = self.ranks.leader.settled([r for r in states if self.live[r] is not None])
        assert len(settled) == len(dict(settled))
        assert dict(settled) == {
            rid: state
            for rid, state in states.items()
            if state is not CopyState.WAITING and self.live[rid] is not None
        }
        for rid in self.live:
            state = self.ranks.leader.request_state(rid)
            assert isinstance(state, CopyState | AskFailed)
            assert (rid in self.gone) <= isinstance(state, AskFailed)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
