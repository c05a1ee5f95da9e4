"""Pins that ``GET /debug/state`` is bounded however many adapters and requests there are.

Every key of it is explained in docs/operations.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.page.debug_state import LIMIT, LONG_TABLES, cut_report, limit_of
from mstar_tp.wire.adapter_limits import AdapterLimits, AdapterShare
from mstar_tp.wire.schedule import Checks
from mstar_tp.wire.states import AdapterState, CpuCacheState, FailedRead, StageState, StateReport
from mstar_tp.wire.values import AdapterKey

TEXT = (Path(__file__).parents[4] / "docs" / "operations.md").read_text(encoding="utf-8")
MANY = 5000


def report() -> StateReport:
    """A rank's tables with ``MANY`` entries in each that may be long."""
    keys = tuple(AdapterKey(f"adapter-{number}", 0) for number in range(MANY))
    host = CpuCacheState(unit="adapters", capacity=1, used=1, peak=1, memory_bytes=1, peak_bytes=1)
    states = tuple(AdapterState(adapter=key) for key in keys)
    shares = tuple(
        AdapterShare(
            adapter=key.name, running=0, waiting=1, share=0.1, tokens=1, limits=AdapterLimits()
        )
        for key in keys
    )
    reads = tuple(FailedRead(adapter=key, fetch_no=0, rank=0, cause="gone") for key in keys)
    return StateReport(
        rank=1, query_id=0, requests=tuple(range(MANY)), pages_used=0, pages_total=8, slots=(),
        cpu_cache=keys, served=keys, host=host, failed_reads=reads, waiting=3, running=4, steps=5,
        steps_waited_for_read=0, preemptions=0, gap_us=0,
        adapters=states, shares=shares,
        checks=Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0),
        other_stages=(StageState(stage="vision", slots=(), cpu_cache=keys, host=host),),
    )  # fmt: skip


def decoded(limit: int) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(cut_report(report(), limit)))
    return found


@pytest.mark.parametrize("limit", [0, 1, LIMIT])
def test_tables_that_may_be_long_are_cut_and_say_by_how_much(limit: int) -> None:
    found = decoded(limit)
    for name in LONG_TABLES:
        assert len(found[name]) == limit
        assert found["left_out"][name] == MANY - limit
    assert len(found["other_stages"][0]["cpu_cache"]) == limit
    assert len(msgspec.json.encode(found)) < 2000 + 700 * (limit + 1)


def test_a_table_that_fits_is_whole() -> None:
    found = decoded(MANY)
    assert found["left_out"] == {}
    assert found["served"][-1]["name"] == f"adapter-{MANY - 1}"


@pytest.mark.parametrize("text", ["", "-1", "1e3", "100001", "999999999", "٣"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="limit: must be a whole number from 0 to 100000"):
        limit_of(text)


def test_every_key_is_explained_and_no_other() -> None:
    table = TEXT.partition("\n## Tables\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", table, re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(decoded(1))
