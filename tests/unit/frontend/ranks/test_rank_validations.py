"""Pins how the validations of several ranks become one sentence.

Each text is there once, with its ranks, and the adapter is named once.
"""

from __future__ import annotations

import pytest

from mstar_tp.frontend.adapters.rank_validations import RankValidations, by_text
from mstar_tp.wire.reports import LoadResult


@pytest.mark.parametrize(
    ("told", "world_size", "lines"),
    [
        ({0: "a", 1: "a"}, 2, ["all ranks: a"]),
        ({0: "rank 0: a", 1: "rank 1: a"}, 2, ["all ranks: a"]),
        ({0: "a", 1: "a"}, 3, ["ranks 0, 1: a"]),
        ({0: "a", 1: "b", 2: "a"}, 3, ["ranks 0, 2: a", "rank 1: b"]),
        ({0: "a"}, 1, ["rank 0: a"]),
        ({0: "rank 1 is silent"}, 2, ["rank 1 is silent"]),
        ({}, 2, []),
    ],
)
def test_each_text_is_told_once_with_its_ranks(
    told: dict[int, str], world_size: int, lines: list[str]
) -> None:
    assert by_text(told.items(), world_size, named=True) == lines


def test_a_refusal_names_its_adapter_once() -> None:
    verdicts = RankValidations(2)
    for rank in range(2):
        cause = "adapter 'x': rank 32 is over 16" if rank else None
        verdicts.take(rank, LoadResult(rank=rank, load_id=0, cause=cause))
    assert verdicts.refusal("x") == "adapter 'x' was refused by rank 1: rank 32 is over 16"
