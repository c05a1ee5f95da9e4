"""Files that break on one rank alone, at any moment: the requests on them fail on every rank alike,
with an error that names the rank and the cause; the next one reads anew; nobody else loses a step.

Real ranks that see files of their own, one device slot, two adapters in host memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.views_kit import DAMAGES, LONG, RANKS, WEIGHTS, Driver, Views, take_away, truncate

from mstar_tp.common.errors import MstarError
from mstar_tp.testing.faults import FailRead, SlowRead, WrongBytes
from mstar_tp.testing.tiny_models import make_adapter
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

NEVER_S = 3600.0


def check_failed(driver: Driver, rids: list[int], name: str, rank: int, *more: str) -> None:
    """All failed, with one text, which names adapter, rank and cause."""
    texts = {driver.instance.result(rid).failed for rid in rids}
    assert len(texts) == 1
    text = str(texts.pop())
    for part in (f"'{name}'", f"rank {rank}", *more):
        assert part in text
    assert all(driver.instance.result(rid).tokens == [] for rid in rids)


CAUSES = {
    "truncated": ("truncated", WEIGHTS),
    "gone": ("no such folder",),
    "unreadable": ("is not a regular file", WEIGHTS),
    "other": ("has changed since it was loaded", WEIGHTS),
}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_damaged_before_its_first_request(
    driver: Driver, views: Views, base: list[int], whole: list[int], damage: str, rank: int
) -> None:
    name = f"unread-{damage}-{rank}"
    folder = views.ranks[rank] / name
    DAMAGES[damage](folder)
    witness = driver.ask(None)
    rids = [driver.ask(name) for _ in range(2)]
    beside = driver.ask("well")
    check_failed(driver, rids, name, rank, *CAUSES[damage])
    assert driver.instance.result(witness).ids == base
    assert driver.instance.result(beside).ids == whole
    driver.settled()
    # Whole again: what was only away is read by the next request; what was written is another file
    # than the one that was checked, and is served once it is loaded anew.
    if damage == "gone":
        folder.with_name(f"{name}-away").rename(folder)
    else:
        _repair(views, name, rank)
        check_failed(driver, [driver.ask(name)], name, rank, "has changed since it was loaded")
        driver.unload(name)
        assert driver.load(name, 1) is None
    assert driver.answer(name, int(damage != "gone")).ids == whole


def _repair(views: Views, name: str, rank: int) -> None:
    weights = views.ranks[rank] / name / WEIGHTS
    if weights.is_dir():
        weights.rmdir()
    views.put(name, "a", [rank])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_damaged_between_eviction_and_the_next_read(
    driver: Driver, views: Views, base: list[int], whole: list[int], damage: str
) -> None:
    name, rank = f"read-{damage}", 1
    folder = views.ranks[rank] / name
    assert driver.answer(name).ids == whole
    driver.evict()
    assert all(AdapterKey(name, FIRST_GENERATION) not in s.cpu_cache for s in driver.settled())
    DAMAGES[damage](folder)
    witness = driver.ask(None)
    more = ("has digest", "but was served with") if damage == "other" else CAUSES[damage]
    check_failed(driver, [driver.ask(name), driver.ask(name)], name, rank, *more)
    assert driver.instance.result(witness).ids == base
    if damage == "gone":
        folder.with_name(f"{name}-away").rename(folder)
    else:
        _repair(views, name, rank)
    # The digest all ranks agreed on says that it is the same adapter, though another file.
    assert driver.answer(name).ids == whole


def test_a_file_damaged_once_its_copy_is_in_harms_nobody(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    """Between ingest and admit: the only slot is taken, and the copies are in."""
    running = driver.ask("well", params=LONG)
    waiting = driver.ask("waits")
    driver.digest("waits")
    for rank in RANKS:
        truncate(views.ranks[rank] / "waits")
    assert driver.instance.result(waiting).ids == whole
    assert driver.instance.result(running).failed is None


def test_a_file_damaged_while_its_request_waits_for_host_memory(
    driver: Driver, views: Views, base: list[int], whole: list[int]
) -> None:
    """Between ingest and admit: ingested, and not to be read before two others have gone."""
    views.put("late", "a")
    assert driver.load("late", 1) is None
    running = [driver.ask(name, params=LONG) for name in ("well", "well-2")]
    waiting = [driver.ask("late", 1) for _ in range(2)]
    states = driver.instance.inspect()
    assert all(AdapterKey("late", 1) not in state.cpu_cache for state in states)
    take_away(views.ranks[1] / "late")
    witness = driver.ask(None)
    check_failed(driver, waiting, "late", 1, "no such folder")
    assert driver.instance.result(witness).ids == base
    assert [driver.instance.result(rid).failed for rid in running] == [None, None]
    (views.ranks[1] / "late-away").rename(views.ranks[1] / "late")
    assert driver.answer("late", 1).ids == whole


@pytest.mark.parametrize("rank", RANKS)
def test_a_read_that_is_slow_and_then_fails_on_one_rank(
    driver: Driver, views: Views, base: list[int], whole: list[int], rank: int
) -> None:
    name = f"stuck-{rank}"
    slow = SlowRead(rank=rank, adapter=name, seconds=NEVER_S)
    fails = FailRead(rank=rank, adapter=name, cause="input/output error")
    views.set_faults(slow, fails)
    doomed = [driver.ask(name)]
    for _ in range(2):  # others come and go meanwhile, also on adapters that are read just now
        assert driver.answer(None).ids == base
        assert driver.answer("well").ids == whole
        assert driver.answer("well-2").ids == whole
    doomed.append(driver.ask(name))
    states = driver.instance.inspect()
    assert all(set(doomed) == set(state.requests) for state in states)
    views.set_faults(fails)
    check_failed(driver, doomed, name, rank, "input/output error")
    views.set_faults()
    assert driver.answer(name).ids == whole


def test_a_read_that_fails_is_tried_again_by_the_next_request_and_by_no_other(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    views.set_faults(FailRead(rank=1, adapter="flaky"))
    for _ in range(3):
        check_failed(driver, [driver.ask("flaky")], "flaky", 1, "input/output error")
    views.set_faults()
    assert driver.answer("flaky").ids == whole


def test_other_weights_on_one_rank_are_never_served(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    """At the first read nothing says which of them is right: both ranks are named."""
    views.set_faults(WrongBytes(rank=1, adapter="twins"))
    check_failed(driver, [driver.ask("twins")], "twins", 1, "rank 0", "digest", "make them equal")
    views.set_faults()
    assert driver.answer("twins").ids == whole
    driver.evict()
    views.set_faults(WrongBytes(rank=1, adapter="twins"))
    check_failed(driver, [driver.ask("twins")], "twins", 1, "digest", "it was served with")
    views.set_faults()
    assert driver.answer("twins").ids == whole


def test_a_start_whose_ranks_see_different_adapters_names_them(tmp_path: Path) -> None:
    """What ranks decide by must be equal: the slot rank and the targets of every adapter."""
    views = Views(tmp_path)
    make_adapter(tmp_path / "smaller", views.model, rank=2, seed=0)
    views.put("twins", "smaller", [1])
    with pytest.raises(MstarError) as error, views.start(slots=1, held=2):
        pytest.fail("the instance started")
    told = str(error.value).split("--- rank0.log")[0]
    assert "'twins'" in told and "make the files equal" in told and "well" not in told
