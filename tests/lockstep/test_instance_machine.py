"""Real ranks as threads, whose messages, reads and turns a seed delays and interleaves in every way
the channels allow: whatever is asked of them and whatever breaks, they stay one.

At the end of every run no request waits, nothing is left, every rank's tables and trails are equal,
and the brute-force pool has predicted every decision of every rank (``trails``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.thread_instance import ThreadInstance
from troubles import DAMAGES, NAMES, Damage, Faults

LARGEST = 1152
"""Bytes of the largest adapter on a rank."""
SEEDS = st.integers(0, 1 << 16)


class InstanceMachine(RuleBasedStateMachine):
    @initialize(
        world_size=st.sampled_from([2, 2, 2, 3, 4]),
        slots=st.integers(1, 3),
        spare=st.integers(0, 2),
        in_bytes=st.booleans(),
        num_pages=st.integers(5, 8),
        num_host_pages=st.sampled_from([0, 2, 8]),
        fine=st.booleans(),
        overlap=st.sampled_from(["off", "on", "deferred"]),
        configured=st.integers(1, 4),
    )
    def start(
        self,
        world_size: int,
        slots: int,
        spare: int,
        in_bytes: bool,
        num_pages: int,
        num_host_pages: int,
        fine: bool,
        overlap: str,
        configured: int,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.instance = ThreadInstance(
            Path(self.folder.name),
            world_size=world_size,
            slots=slots,
            cpu_capacity=LARGEST * slots + 600 * spare if in_bytes else slots + spare,
            in_bytes=in_bytes,
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            fine=fine,
            overlap=overlap != "off",
            deferred=overlap == "deferred",
        )
        self.instance.start(*NAMES[:configured])
        self.faults = Faults(self.instance)

    def teardown(self) -> None:
        if not hasattr(self, "faults"):
            return
        try:
            self.faults.check()
        finally:
            self.instance.close()
            self.folder.cleanup()

    @rule(
        data=st.data(),
        count=st.integers(1, 4),
        prompt=st.integers(1, 5),
        max_tokens=st.integers(1, 4),
        stops=st.booleans(),
    )
    def submit(
        self, data: st.DataObject, count: int, prompt: int, max_tokens: int, stops: bool
    ) -> None:
        for _ in range(count):
            key = data.draw(st.sampled_from(self.faults.keys()))
            self.faults.submit(key, prompt, max_tokens, stops)

    @precondition(lambda self: self.instance.adapter_of)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any request, also one that has ended."""
        self.instance.abort(data.draw(st.sampled_from(sorted(self.instance.adapter_of))))

    @rule(
        name=st.sampled_from(NAMES),
        differs_on=st.sampled_from([None, None, None, 0, 1]),
        in_place=st.booleans(),
    )
    def load(self, name: str, differs_on: int | None, in_place: bool) -> None:
        self.faults.load(name, differs_on, in_place=in_place)

    @precondition(lambda self: self.instance.served)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        self.faults.unload(data.draw(st.sampled_from(sorted(self.instance.served))))

    @rule(data=st.data(), kind=st.sampled_from(DAMAGES))
    def damage(self, data: st.DataObject, kind: Damage) -> None:
        key = data.draw(st.sampled_from(sorted(self.instance.codes)))
        rank = data.draw(st.integers(0, self.instance.world_size - 1))
        self.faults.damage(key, rank, kind)

    @precondition(lambda self: self.faults.damaged)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.faults.restore(*data.draw(st.sampled_from(sorted(self.faults.damaged))))

    @rule(rank=st.integers(0, 3))
    def slow_reads(self, rank: int) -> None:
        self.instance.stalled ^= {rank % self.instance.world_size}

    @rule(seed=SEEDS, limit=st.integers(1, 150))
    def run_for_a_while(self, seed: int, limit: int) -> None:
        self.instance.run(seed, limit)

    @rule(seed=SEEDS)
    def run_until_nothing_moves(self, seed: int) -> None:
        assert self.instance.run(seed), self.instance.interleaving.waits()

    @invariant()
    def within_bounds(self) -> None:
        if hasattr(self, "faults"):
            self.faults.check_bounds()


# Not shrunk: that takes minutes, and what is found is short and replays as it is.
InstanceMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestInstance = InstanceMachine.TestCase


@pytest.mark.parametrize(
    ("overlap", "fine"),
    [(True, True), (True, False), (False, True)],
    ids=["overlap-fine", "overlap", "one-step-fine"],
)
@pytest.mark.parametrize(
    ("world_size", "slots", "cpu_capacity", "seed"),
    [
        (1, 2, 3, 10),
        *((2, 1 + seed % 3, 3 + seed % 2, seed) for seed in range(6)),
        *((2, slots, LARGEST * slots + 400 * slots, slots) for slots in (1, 2, 3)),
        (3, 2, 2, 11),
        (4, 2, 4, 12),
        (5, 1, 1, 13),
        (8, 3, 5, 14),
    ],
)
def test_a_storm_of_requests_loads_and_damage_leaves_all_ranks_one(
    tmp_path: Path,
    world_size: int,
    slots: int,
    cpu_capacity: int,
    seed: int,
    fine: bool,
    overlap: bool,
) -> None:
    instance = ThreadInstance(
        tmp_path,
        world_size=world_size,
        slots=slots,
        cpu_capacity=cpu_capacity,
        in_bytes=cpu_capacity >= LARGEST,
        num_pages=5 + seed % 4,
        num_host_pages=seed % 3 * 3,
        fine=fine,
        overlap=overlap,
    )
    try:
        instance.start(*NAMES[:4])
        troubles = Faults(instance)
        troubles.stress(seed, requests=60)
        troubles.check()
        hows = [ending.how for ending in instance.endings.values()]
        assert min(hows.count(how) for how in ("length", "stop", "failed", "aborted")) > 0
    finally:
        instance.close()
