"""Loads and unloads among running requests: a name is served from its commit's place in the order,
on every rank or on none, and old weights go to nobody who asks after it.
"""

from __future__ import annotations

import pytest
from support.views_kit import DAMAGES, LONG, RANKS, Driver, Views, take_away

from mstar_tp.wire.commands import LoadCommit
from mstar_tp.wire.values import AdapterKey


@pytest.fixture(scope="module")
def other(driver_once: Driver, views: Views, whole: list[int]) -> list[int]:
    """The answer on an adapter with the weights ``b``."""
    views.put("other", "b")
    assert driver_once.load("other", 1) is None
    ids = driver_once.answer("other", 1).ids
    assert ids != whole
    return ids


@pytest.fixture(scope="module")
def driver_once(one_slot: object) -> Driver:
    return Driver(one_slot)  # type: ignore[arg-type]


def test_a_name_is_served_from_the_place_of_its_commit(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    views.put("fresh", "a")
    load_id = driver.announce("fresh", 1)
    assert driver.validations()[load_id] == {0: None, 1: None}
    before = driver.ask("fresh", 1)
    assert driver.commit(load_id) is None
    after = driver.ask("fresh", 1)
    assert "'fresh' is not served" in str(driver.instance.result(before).failed)
    assert driver.instance.result(after).ids == whole


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "other"])
def test_one_rank_that_refuses_takes_a_load_back_everywhere(
    driver: Driver, views: Views, whole: list[int], damage: str
) -> None:
    name = f"refused-{damage}"
    views.put(name, "a")
    DAMAGES[damage](views.ranks[1] / name)
    load_id = driver.announce(name, 1)
    causes = driver.validations()[load_id]
    assert causes[0] is None and f"'{name}'" in str(causes[1]) and name in str(causes[1])
    driver.abort(load_id)
    assert "is not served" in str(driver.answer(name, 1).failed)
    assert "was never announced" in str(driver.commit(load_id)), "it was taken back, not only kept"
    assert driver.answer("well").ids == whole


def test_a_second_load_of_a_served_name_never_takes_the_first_one_down(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    views.put("twice", "a")
    assert driver.load("twice", 1) is None
    views.put("twice-b", "b")
    # Good files: every rank accepts them, and the order refuses the name.
    accepted = driver.announce("twice", 2, "twice-b")
    assert driver.validations()[accepted] == {0: None, 1: None}
    cause = str(driver.commit(accepted))
    assert "'twice' is served already" in cause and "unload it first" in cause
    # Bad files: refused, then taken back.
    refused = driver.announce("twice", 3, "nowhere")
    assert all("nowhere" in str(cause) for cause in driver.validations()[refused].values())
    driver.abort(refused)
    assert driver.answer("twice", 1).ids == whole
    for generation in (2, 3):
        assert "is not served" in str(driver.answer("twice", generation).failed)


def test_served_already_is_judged_where_the_commit_stands(
    driver: Driver, views: Views, whole: list[int], other: list[int]
) -> None:
    """Both were checked while the first one was served; only the order of the commit counts."""
    views.put("moves", "a")
    views.put("moves-b", "b")
    assert driver.load("moves", 1) is None
    early, late = driver.announce("moves", 2, "moves-b"), driver.announce("moves", 3, "moves-b")
    validations = driver.validations(2)
    assert not any(cause for causes in validations.values() for cause in causes.values())
    assert "is served already" in str(driver.commit(early))
    driver.unload("moves", 1)
    assert driver.commit(late) is None
    assert driver.answer("moves", 3).ids == other
    assert "is not served" in str(driver.answer("moves", 1).failed)


def test_live_requests_finish_on_the_weights_of_a_name_that_is_unloaded_and_loaded_anew(
    driver: Driver, views: Views, whole: list[int], other: list[int]
) -> None:
    views.put("swaps", "a")
    assert driver.load("swaps", 1) is None
    running = driver.ask("swaps", 1, LONG)
    waiting = [driver.ask("swaps", 1) for _ in range(2)]
    first = driver.digest("swaps", 1)
    driver.unload("swaps", 1)
    views.put("swaps", "b")  # whoever replaces the folder does not wait for anybody
    assert driver.load("swaps", 2) is None, "a retiring name may be loaded again"
    fresh, stale = driver.ask("swaps", 2), driver.ask("swaps", 1)
    assert [driver.instance.result(rid).ids for rid in waiting] == [whole, whole]
    assert driver.instance.result(fresh).ids == other
    assert "is not served" in str(driver.instance.result(stale).failed)
    long = driver.instance.result(running)
    assert long.failed is None and long.ids[: len(whole)] == whole
    assert driver.digest("swaps", 2) != first
    for state in driver.settled():
        assert all(slot.adapter != AdapterKey("swaps", 1) for slot in state.slots)
        assert AdapterKey("swaps", 1) not in state.cpu_cache


def test_a_retired_adapter_can_be_read_again_for_those_who_may_still_name_it(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    """Unloaded while its request waits for host memory, so before its file was ever read."""
    views.put("retires", "a")
    assert driver.load("retires", 1) is None
    running = [driver.ask(name, params=LONG) for name in ("well", "well-2")]
    waiting = driver.ask("retires", 1)
    driver.unload("retires", 1)
    assert driver.instance.result(waiting).ids == whole
    assert [driver.instance.result(rid).failed for rid in running] == [None, None]


def test_a_file_that_changes_between_its_check_and_its_commit_is_not_served(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    views.put("between", "a")
    load_id = driver.announce("between", 1)
    assert driver.validations()[load_id] == {0: None, 1: None}
    take_away(views.ranks[1] / "between")
    assert driver.commit(load_id) is None
    failed = str(driver.answer("between", 1).failed)
    assert "rank 1" in failed and "no such folder" in failed
    views.put("between", "b", [1])  # another file than the one that was checked
    failed = str(driver.answer("between", 1).failed)
    assert "rank 1" in failed and "has changed since it was loaded" in failed
    driver.unload("between", 1)
    views.put("between", "a")
    assert driver.load("between", 2) is None
    assert driver.answer("between", 2).ids == whole


def test_many_loads_at_once_are_all_checked_and_served(
    driver: Driver, views: Views, whole: list[int]
) -> None:
    views.put("same", "a")
    witness = driver.ask("well", params=LONG)
    loads = [driver.announce(f"many-{number}", 1, "same") for number in range(200)]
    validations = driver.validations(len(loads))
    assert all(validations[load_id] == dict.fromkeys(RANKS) for load_id in loads)
    for load_id in loads:
        driver.instance.send(LoadCommit(load_id=load_id))
    driver.done(len(loads))
    rids = [driver.ask(f"many-{number}", 1) for number in (0, 77, 199)]
    assert [driver.instance.result(rid).ids for rid in rids] == [whole] * 3
    assert driver.instance.result(witness).failed is None
