"""What whole instances of thread-ranks recorded while a seed tossed everything about, replayed; and
what comes of a follower that goes its own way.

The replay runs the ranks' own tables, so each rebuilt table is compared with that of the rank it is
of, and every hash with the one that rank computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.thread_instance import ThreadInstance
from support.thread_rank import ThreadRank
from trails import check_rest
from troubles import NAMES, Faults

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.checks import STEP_TABLES
from mstar_tp.recording import FileRecorder, Recorder, recording_path
from mstar_tp.recording.entries import FORMAT, LoraSizes, Start, schema_hash
from mstar_tp.recording.reader import read_recording
from mstar_tp.tools.replay.compare import compare
from mstar_tp.tools.replay.replayer import Replayer
from mstar_tp.tools.replay.script import Script
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.commands import Unload
from mstar_tp.wire.values import AdapterKey

both_ways = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one-step"])


def start(instance: ThreadInstance, rank: ThreadRank) -> Start:
    return Start(
        format=FORMAT,
        schema=schema_hash(),
        version="test",
        rank=rank.rank,
        world_size=instance.world_size,
        epoch=0,
        config_digest="d",
        deferred=instance.deferred,
        prefix_caching=rank.kv.sharing.enabled,
        num_pages=rank.kv.table.num_pages,
        page_size=rank.kv.table.page_size,
        num_host_pages=rank.kv.kept.host.num_pages,
        lora=tuple(
            LoraSizes(
                stage=pool.stage.name,
                of_images=pool.stage.image_tokens is not None,
                slots=pool.spec.slots,
                cpu_capacity=pool.spec.cpu_capacity,
                cpu_unit=pool.spec.cpu_unit,
                adapters=tuple(instance.configured),
                pinned=tuple(key for key in instance.configured if instance.limits_of(key).pinned),
            )
            for pool in rank.lora.pools
        ),
    )


class RecordedInstance(ThreadInstance):
    """Every rank records to a file of its own."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        self.recorders: list[FileRecorder] = []
        self._base = str(folder / "run.rec")
        super().__init__(folder / "files", **sizes)

    def recorder_of(self, rank: int) -> Recorder:
        self.recorders.append(FileRecorder(recording_path(self._base, rank, 0)))
        return self.recorders[-1]


@contextmanager
def recorded(folder: Path, **sizes: Any) -> Iterator[ThreadInstance]:
    """An instance that serves four adapters; closed afterwards, with whole recordings."""
    instance = RecordedInstance(folder, **sizes)
    try:
        instance.start(*NAMES[:4])
        for recorder, rank in zip(instance.recorders, instance.ranks, strict=True):
            recorder.start(start(instance, rank))
        yield instance
    finally:
        instance.close()
        for recorder in instance.recorders:
            recorder.close()


def script(folder: Path, rank: int) -> Script:
    return Script(read_recording(recording_path(str(folder / "run.rec"), rank, 0)))


@both_ways
@pytest.mark.parametrize(
    ("world_size", "slots", "cpu_capacity", "seed", "vision_slots"),
    [
        (1, 2, 3, 20, None),
        *((2, 1 + seed % 3, 3 + seed % 2, 20 + seed, None) for seed in range(4)),
        (4, 2, 2, 25, None),
        (2, 2, 3, 26, 1),
    ],
)
def test_a_storm_replays_to_the_tables_that_every_rank_had(
    tmp_path: Path,
    world_size: int,
    slots: int,
    cpu_capacity: int,
    seed: int,
    vision_slots: int | None,
    overlap: bool,
) -> None:
    sizes: dict[str, Any] = {"slots": slots, "cpu_capacity": cpu_capacity}
    sizes |= {"num_pages": 5 + seed % 4, "num_host_pages": 3 * (seed % 3)}
    sizes["vision_slots"] = vision_slots
    with recorded(tmp_path, world_size=world_size, overlap=overlap, **sizes) as instance:
        Faults(instance).stress(seed, requests=40)
        instance.settle(seed)
    check_replays(tmp_path, instance)


@both_ways
@pytest.mark.parametrize(("slots", "cpu_capacity"), [(2, 2), (3, 4)])
def test_pinned_adapters_keep_their_slots_in_a_storm_and_replays_know_them(
    tmp_path: Path, slots: int, cpu_capacity: int, overlap: bool
) -> None:
    """With turns and limits too. With two slots the second that is to be pinned is refused."""
    limits: dict[str | None, AdapterLimits] = {
        "a": AdapterLimits(pinned=True),
        "e": AdapterLimits(pinned=True, weight=4.0),
        "b": AdapterLimits(max_rows=1),
        None: AdapterLimits(max_rows=2, weight=0.5),
    }
    sizes: dict[str, Any] = {"slots": slots, "cpu_capacity": cpu_capacity, "limits": limits}
    stayed = 0
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with recorded(folder, overlap=overlap, fair=True, **sizes) as instance:
            Faults(instance).stress(seed, requests=30)
            instance.settle(seed)
            check_rest(instance)
        check_replays(folder, instance)
        stayed += sum(check_stays(rank, limits) for rank in instance.ranks)
    assert stayed > 20, "pinned adapters were in slots while others came and went"


def check_stays(rank: ThreadRank, limits: Mapping[str | None, AdapterLimits]) -> int:
    """From its first step on until it was unloaded, a pinned adapter stays in one slot; in how many
    events one was seen to.
    """
    slot_of: dict[AdapterKey, int] = {}
    gone: set[AdapterKey] = set()
    seen = 0
    for event in rank.events_by_stage[0]:
        if event.kind == "apply" and isinstance(event.detail[0], Unload):
            slot_of.pop(event.detail[0].key, None)
            gone.add(event.detail[0].key)
        if event.slots is None:
            continue
        for key, slot in slot_of.items():
            assert event.slots[slot - 1][1] == key, f"{key} left its slot in {event}"
            seen += 1
        for slot, key, _ in event.slots:
            if key is not None and key not in gone:
                if limits.get(key.name, NO_LIMITS).pinned:
                    slot_of[key] = slot
    return seen


def check_replays(tmp_path: Path, instance: ThreadInstance) -> None:
    """Every rank's recording rebuilds its tables, and all are alike."""
    for rank in instance.ranks:
        replayer = Replayer(script(tmp_path, rank.rank))
        count = 0
        while (replayed := replayer.advance()) is not None:
            assert replayed.departed is None
            assert replayed.split is None
            assert set(STEP_TABLES) <= set(replayed.recorded)
            replayer.run(replayed)
            count += 1
        assert count == rank.runner.steps > 10
        for table in ("cpu_cache", "served", "slots", "pages"):
            assert replayer.state.table_rows(table) == rank.state.table_rows(table), table
        rebuilt, actual = replayer.state.checks(), rank.state.checks()
        for table in ("cpu_cache", "served", "slots", "pages"):
            assert getattr(rebuilt, table) == getattr(actual, table), table
    for other in range(1, instance.world_size):
        comparison = compare(script(tmp_path, 0), script(tmp_path, other))
        assert comparison.difference is None
        assert comparison.steps == count


def lose_holder(rank: ThreadRank) -> None:
    entries = rank.pool.tables.slots._slots.values()
    next(entry for entry in entries if entry.holders).holders.popitem()


def swap_adapters(rank: ThreadRank) -> None:
    slots = rank.pool.tables.slots._slots
    slots[1].key, slots[2].key = slots[2].key, slots[1].key


def touch_clock(rank: ThreadRank) -> None:
    rank.pool.tables.slots._slots[2].used += 1


def swap_free_pages(rank: ThreadRank) -> None:
    rank.kv.table._blank.rotate(1)


def fetch_again(rank: ThreadRank) -> None:
    cpu_cache = rank.pool.store.cpu_cache
    cpu_cache.fetch(cpu_cache.keys()[0])


def drop_held(rank: ThreadRank) -> None:
    rank.pool.store.cpu_cache.drop(rank.pool.store.cpu_cache.keys()[-1])


def retire_name(rank: ThreadRank) -> None:
    registry = rank.pool.tables.registry
    registry.retire(registry.keys()[0])


def draw_other_tokens(rank: ThreadRank) -> None:
    commit = rank.requests.commit

    def other(step: Any, sampled: Any) -> dict[int, str]:
        rank.requests.commit = commit  # type: ignore[method-assign]
        ended = commit(step, [token + 1 for token in sampled])
        # This model stops at a token that is not its adapter's; the hash must see it by itself.
        for row, token in zip((r for r in step.rows if r.samples), sampled, strict=True):
            rank.requests[row.rid].tokens[-1] = token
        return ended

    rank.requests.commit = other  # type: ignore[method-assign]


@both_ways
@pytest.mark.parametrize("follower", [1, 2])
@pytest.mark.parametrize(
    ("table", "diverge"),
    [
        ("slots", lose_holder),
        ("slots", swap_adapters),
        ("slots", touch_clock),
        ("pages", swap_free_pages),
        ("cpu_cache", fetch_again),
        ("cpu_cache", drop_held),
        ("served", retire_name),
        ("tokens", draw_other_tokens),
    ],
)
def test_a_follower_that_diverges_is_stopped_at_once_by_name(
    tmp_path: Path,
    table: str,
    diverge: Callable[[ThreadRank], None],
    follower: int,
    overlap: bool,
) -> None:
    with recorded(tmp_path, world_size=3, overlap=overlap, num_pages=24) as instance:
        rank = instance.ranks[follower]
        admit = rank.pool.admit
        at: list[int] = []

        def diverging(step: Any) -> Any:
            """Goes its own way once both slots are held, as the admit after is over."""
            outcome = admit(step)
            held = [row for row in rank.pool.tables.slots.rows() if row[2]]
            if len(held) == 2 and not at:
                at.append(step.tp_seq)
                diverge(rank)
            return outcome

        rank.pool.admit = diverging  # type: ignore[method-assign]
        for name in "abab":
            instance.submit(instance.served[name], prompt=2, max_tokens=8)
        with pytest.raises(LockstepError) as stopped:
            instance.settle(seed=3)
    named = re.search(r"rank (\d) step (\d+): its table of (\w+) differs", str(stopped.value))
    assert named is not None, stopped.value
    step = int(named[2])
    assert (int(named[1]), named[3]) == (follower, table)
    # Tokens of the step itself, which ran on, and pages once they are handed out.
    assert at[0] < step <= at[0] + (3 if table in ("tokens", "pages") else 2)
    comparison = compare(script(tmp_path, 0), script(tmp_path, follower))
    assert comparison.difference is not None
    assert (comparison.difference.step, comparison.difference.table) == (step, table)
    others = compare(script(tmp_path, 0), script(tmp_path, 3 - follower))
    assert others.difference is None
