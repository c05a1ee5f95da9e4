"""Bodies and order come on two channels, and one may be late: what a follower keeps follows from
the order alone. A remove that races an ingest never leaves it without a copy that the leader kept,
and a body that came early starts a read and nothing else.

Each test forces one arrival order: what is meant for a rank is held until the other has acted.
"""

from __future__ import annotations

import pytest
from support.views_kit import LONG, Driver, Views

from mstar_tp.testing.faults import SlowRead
from mstar_tp.wire.commands import Abort
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

NEVER_S = 3600.0


@pytest.mark.parametrize("ordered_first", ["ingest", "remove"])
def test_a_remove_that_races_an_ingest_whose_body_comes_late(
    driver: Driver, views: Views, whole: list[int], base: list[int], ordered_first: str
) -> None:
    """Rank 1 gets the Remove, and the order of the bodies around it, long before these bodies."""
    instance, name = driver.instance, f"late-{ordered_first}"
    views.set_faults(SlowRead(rank=1, adapter=name, seconds=NEVER_S))
    first = driver.ask(name)  # waits for rank 1's read, so nothing of it runs
    instance.hold(1)
    rids = [driver.ask(name)] if ordered_first == "ingest" else []
    instance.send(Abort(rid=first))
    driver.removed(first, rank=0)
    rids += [driver.ask(other) for other in ("crowd-1", "crowd-2")]  # for two places
    if ordered_first == "remove":
        rids.append(driver.ask(name))
    (leader,) = instance.inspect(0)
    kept = AdapterKey(name, FIRST_GENERATION) in leader.cpu_cache
    assert kept == (ordered_first == "ingest")
    instance.release(1)
    states = instance.inspect()
    assert states[0].cpu_cache == states[1].cpu_cache == leader.cpu_cache
    assert states[0].requests == states[1].requests
    assert first not in states[0].requests
    assert driver.answer(None).ids == base
    views.set_faults()
    for rid in rids:
        assert instance.result(rid).ids == whole


@pytest.mark.parametrize("names", [("early", "crowd-1"), ("crowd-1", "crowd-2", "early")])
def test_a_remove_that_races_an_ingest_whose_body_comes_early(
    driver: Driver, whole: list[int], names: tuple[str, ...]
) -> None:
    """Rank 1 has bodies that the leader has not seen when it orders the Remove before them."""
    instance = driver.instance
    first = driver.ask("early", params=LONG)
    assert instance.inspect(0)[0].requests == (first,)
    instance.hold(0)
    rids = [driver.ask(name) for name in names]
    assert instance.result(first).failed is None  # and its Remove goes out now
    instance.release(0)
    for rid in rids:
        assert instance.result(rid).ids == whole
