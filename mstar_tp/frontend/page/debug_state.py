"""The answer to GET /debug/state: tables that may be long are cut, and say by how much."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_tp.frontend.api.api_errors import bad_request
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.wire.states import MAX_STATES, StateReport

LIMIT = MAX_STATES
"""The entries of a table, unless asked for another number."""
MAX_LIMIT = 100_000
LONG_TABLES = ("requests", "cpu_cache", "served", "failed_reads", "adapters", "shares")
"""The tables of a rank that requests and adapters make long; slots are as configured."""


def limit_of(text: str | None) -> int:
    """Return the number of entries of each table that are wanted.

    Raises:
        ApiError: 400, ``text`` is no such number.
    """
    if text is None:
        return LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MAX_LIMIT):
        raise bad_request(f"limit: must be a whole number from 0 to {MAX_LIMIT}", "limit")
    return int(text)


def cut_report(report: StateReport, limit: int) -> dict[str, Any]:
    """Return one rank's tables, with at most ``limit`` entries of each that may be long."""
    found = msgspec.structs.asdict(report)
    left_out = {}
    for name in LONG_TABLES:
        table = found[name]
        if len(table) > limit:
            found[name] = table[:limit]
            left_out[name] = len(table) - limit
    found["other_stages"] = [
        msgspec.structs.replace(stage, cpu_cache=stage.cpu_cache[:limit])
        for stage in report.other_stages
    ]
    return {**found, "left_out": left_out}


def own_state(conductor: Conductor, limit: int) -> dict[str, Any]:
    """Return this process's table of requests; ``epoch``: how often ranks were started again."""
    requests = conductor.requests
    return {
        "requests": requests.table(limit),
        "left_out": {"requests": max(len(requests) - limit, 0)},
        "preparing": requests.request_counters.preparing,
        "phase": conductor.state.service.name.lower(),
        "draining": conductor.state.draining,
        "epoch": conductor.state.epoch,
    }
