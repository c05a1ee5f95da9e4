"""Pins who holds what: every row is held, evenly; few blocks are replicated; uneven is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_tp.common.errors import ConfigError
from mstar_tp.distributed.shard import OutSlice, shard_range


@given(block=st.integers(1, 8), per_rank=st.integers(1, 8), world_size=st.integers(1, 8))
def test_ranks_cut_many_blocks_into_equal_runs_that_cover_all_in_order(
    block: int, per_rank: int, world_size: int
) -> None:
    units = per_rank * world_size
    parts = [
        shard_range(units * block, units, rank, world_size, what="x") for rank in range(world_size)
    ]
    assert [index for part in parts for index in part] == list(range(units * block))
    assert {len(part) for part in parts} == {per_rank * block}


@given(block=st.integers(1, 8), units=st.integers(1, 8), copies=st.integers(1, 4))
def test_neighbouring_ranks_hold_the_same_block_when_there_are_fewer_blocks_than_ranks(
    block: int, units: int, copies: int
) -> None:
    world_size = units * copies
    for rank in range(world_size):
        part = shard_range(units * block, units, rank, world_size, what="x")
        unit = rank // copies
        assert part == range(unit * block, (unit + 1) * block)


def test_query_heads_stay_with_the_kv_head_they_share() -> None:
    # 8 query heads over 2 KV heads on 4 ranks: query heads 0-3 use KV head 0.
    queries, keys = (
        OutSlice(name=n, out_features=u * 16, units=u) for n, u in (("q", 8), ("k", 2))
    )
    for rank in range(4):
        kv_head = keys.rows(rank, 4).start // 16
        assert {row // 16 // 4 for row in queries.rows(rank, 4)} == {kv_head}


@pytest.mark.parametrize(
    ("units", "world_size", "remedy"),
    [(6, 4, "from the divisors of 6"), (2, 3, "as a multiple of 2")],
)
def test_an_uneven_split_is_refused_with_the_remedy(units, world_size, remedy) -> None:
    with pytest.raises(ConfigError, match=f"q_proj.*{remedy}"):
        OutSlice(name="q_proj", out_features=units * 4, units=units).rows(0, world_size)
