"""Look-ahead reads follow the waiting queue: what is read for requests that do not run yet is what
they will run with next, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pool_kit import PoolRanks

from mstar_tp.engine.resources.lora.pool import CopyState
from mstar_tp.wire.values import AdapterKey


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[PoolRanks]:
    made = PoolRanks(tmp_path, slots=1, cpu_capacity=2)
    yield made
    made.close()


@pytest.fixture
def keys(ranks: PoolRanks) -> list[AdapterKey]:
    """Four adapters, for two places in the CPU cache."""
    return ranks.serve("p", "qq", "rrr", "ssss")


def started(ranks: PoolRanks) -> list[str]:
    """Whose reads were begun, in order; the same on every rank."""
    names = [[key.name for key in readers.started] for readers in ranks.readers]
    assert names[0] == names[1]
    return names[0]


def test_waiting_requests_of_the_kept_prefix_are_read_ahead_of_their_turn(
    ranks: PoolRanks, keys: list[AdapterKey]
) -> None:
    for rid in (0, 1):
        ranks.open(rid, keys[rid])
    assert started(ranks) == ["p", "qq"], "qq is read while p waits to run"


def test_a_waiting_request_past_the_kept_prefix_is_not_read(
    ranks: PoolRanks, keys: list[AdapterKey]
) -> None:
    for rid in range(4):
        ranks.open(rid, keys[rid])
    for key in keys[:2]:
        ranks.land(key)
    ranks.admit(0)
    assert started(ranks) == ["p", "qq"]
    assert ranks.leader.request_state(2) is CopyState.WAITING


def test_a_waiting_request_that_moves_into_the_kept_prefix_is_read_then(
    ranks: PoolRanks, keys: list[AdapterKey]
) -> None:
    for rid in range(4):
        ranks.open(rid, keys[rid])
    ranks.remove(1)  # its client left, before its read came in
    assert started(ranks) == ["p", "qq", "rrr"]
    ranks.land(keys[0])
    ranks.admit(0)
    ranks.remove(0)
    assert started(ranks) == ["p", "qq", "rrr", "ssss"]


def test_a_failed_adapter_makes_place_for_the_next_one_in_the_queue(
    ranks: PoolRanks, keys: list[AdapterKey]
) -> None:
    for rid in range(3):
        ranks.open(rid, keys[rid])
    ranks.land(keys[0], only=1, error="gone")
    ranks.drop_failed()
    assert started(ranks) == ["p", "qq", "rrr"]


def test_a_body_that_came_early_is_read_only_while_nothing_held_would_go_for_it(
    ranks: PoolRanks, keys: list[AdapterKey]
) -> None:
    ranks.open(0, keys[0])
    for pool in ranks.pools:
        pool.fetches.read_early(keys[2])
        pool.fetches.read_early(keys[3])
    assert started(ranks) == ["p", "rrr"], "there is room for one"
    ranks.open(1, keys[1])
    ranks.open(2, keys[2])
    assert started(ranks) == ["p", "rrr", "qq"], "rrr is past the kept prefix when its turn comes"
    for rid in (0, 1):
        ranks.land(keys[rid])
        ranks.remove(rid)
    assert started(ranks) == ["p", "rrr", "qq", "rrr"]
