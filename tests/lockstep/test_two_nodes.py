"""Promise: with a second node, whose pool has slots, a CPU cache and reads of its own, ranks stay
one: pools are taken in graph order, all or none, and a fault in one node's part of an adapter ends
the requests that need it, and no other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.thread_instance import LANGUAGE_ONLY, VISION_ONLY, ThreadInstance
from trails import check_rest
from troubles import NAMES, Faults

from mstar_tp.common.errors import LockstepError
from mstar_tp.wire.adapter_limits import AdapterLimits


@pytest.mark.parametrize(
    ("world_size", "vision_slots", "slots", "fine", "overlap"),
    [
        (1, 1, 2, False, True),
        (2, 1, 2, True, True),
        (2, 2, 1, False, True),
        (2, 1, 3, True, False),
        (2, 3, 1, True, True),
        (3, 2, 2, False, True),
        (4, 1, 2, False, False),
    ],
)
def test_a_storm_leaves_all_ranks_one_in_both_nodes(
    tmp_path: Path, world_size: int, vision_slots: int, slots: int, fine: bool, overlap: bool
) -> None:
    instance = ThreadInstance(
        tmp_path,
        world_size=world_size,
        slots=slots,
        cpu_capacity=slots + 1,
        vision_slots=vision_slots,
        fine=fine,
        overlap=overlap,
    )
    try:
        instance.start(*NAMES)
        troubles = Faults(instance)
        troubles.stress(world_size + vision_slots, requests=60)
        troubles.check()
        hows = [ending.how for ending in instance.endings.values()]
        assert min(hows.count(how) for how in ("length", "failed", "aborted")) > 0
        assert all(rank.model.images_encoded for rank in instance.ranks)
    finally:
        instance.close()


def test_a_request_asks_only_the_nodes_that_it_runs_on_an_adapter(tmp_path: Path) -> None:
    """Text alone needs no slot for images; an adapter of one stage needs none in the other."""
    instance = ThreadInstance(tmp_path, slots=1, vision_slots=1, cpu_capacity=2)
    try:
        both, language, vision = instance.start("a", "d", "e")
        instance.settle()
        leader = instance.ranks[0].lora
        asked = {
            instance.submit(both, 3, images=1): (1, 1),
            instance.submit(both, 3): (0, 1),
            instance.submit(language, 3, images=2): (0, 1),
            instance.submit(vision, 3, images=1): (1, 0),
            instance.submit(vision, 3): (0, 0),
            instance.submit(None, 3, images=1): (0, 0),
        }
        instance.withheld |= {"step-0", "step-1"}
        instance.run(1)
        for rid, wanted in asked.items():
            assert tuple(int(pool.needs_copy(rid)) for pool in leader.pools) == wanted, rid
        instance.settle()
        assert [ending.how for ending in instance.endings.values()] == ["length"] * 6
        check_rest(instance)
    finally:
        instance.close()


def test_an_adapter_pinned_in_one_node_takes_no_place_in_the_other(tmp_path: Path) -> None:
    """Each node's pins leave a slot there for the others, and so it must be had."""
    pinned = dict.fromkeys((VISION_ONLY, LANGUAGE_ONLY), AdapterLimits(pinned=True))
    instance = ThreadInstance(tmp_path, slots=2, vision_slots=2, limits=pinned)
    try:
        keys = instance.start(VISION_ONLY, LANGUAGE_ONLY, "a", "b")
        asked = [instance.submit(key, 3, images=1) for key in keys[::-1]]
        instance.settle()
        assert [instance.endings[rid].how for rid in asked] == ["length"] * len(asked)
        check_rest(instance)
    finally:
        instance.close()


def test_a_part_that_cannot_be_read_ends_only_requests_that_need_that_node(tmp_path: Path) -> None:
    instance = ThreadInstance(tmp_path, slots=2, vision_slots=2, cpu_capacity=2)
    try:
        (key,) = instance.start("a")
        # The decoder's part is read; the file breaks before rank 1 reads the part for images.
        instance.withheld.add("read-1-vision-1")
        instance.run(2)
        file = instance.path(key, 1) / "adapter_model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:100])
        seen, text = instance.submit(key, 4, images=2), instance.submit(key, 4)
        instance.settle()
        assert instance.endings[seen].how == "failed"
        assert re.search("rank 1", instance.endings[seen].cause)
        assert instance.endings[text].how == "length"
        drops = [event for event in instance.ranks[1].events if event.kind == "drop_copy"]
        assert [event.detail[0].stage for event in drops] == [0]
        assert all(
            failed.stage == "vision" for failed in instance.ranks[0].lora.reports.failed_reads()
        )
        check_rest(instance)
    finally:
        instance.close()


def test_a_slot_taken_in_one_node_and_not_in_the_other_is_given_back(tmp_path: Path) -> None:
    """Evictions in the smaller pool leave the larger one's slots alone."""
    instance = ThreadInstance(tmp_path, slots=3, vision_slots=1, cpu_capacity=4)
    try:
        keys = instance.start("a", "b", "c")
        for key in keys * 2:
            instance.submit(key, 3, images=1)
            instance.settle()
        vision, language = (pool.reports.stats() for pool in instance.ranks[0].lora.pools)
        assert (vision.evictions, language.evictions) == (5, 0)
        check_rest(instance)
    finally:
        instance.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_table_that_differs_in_one_node_stops_the_rank_and_names_it(
    tmp_path: Path, stage: int
) -> None:
    instance = ThreadInstance(tmp_path, slots=2, vision_slots=2, cpu_capacity=2)
    try:
        (key,) = instance.start("a")
        instance.submit(key, 3, images=1)
        instance.settle()
        instance.ranks[1].lora.pools[stage].tables.slots._slots[1].used += 1
        instance.submit(key, 3, images=1)
        name = ("vision", "language")[stage]
        with pytest.raises(LockstepError, match=f"table of slots differs .*{name} slot 1: a#0"):
            instance.settle()
    finally:
        instance.close()
