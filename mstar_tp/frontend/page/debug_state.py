"""GET /debug/state's answer: tables that may be long are cut, and say by how much."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_tp.frontend.api.api_errors import bad_request
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.wire.states import MAX_STATES, StateReport

LIMIT = MAX_STATES
"""Entries of a table, unless asked for another number."""
MAX_LIMIT = 100_000
LONG_TABLES = ("requests", "cpu_cache", "served", "failed_reads", "adapters", "shares")
"""Of a rank's tables, those that requests and adapters make long. Slots are as configured."""


def limit_of(text: str | None) -> int:
    """How many entries of each table are wanted.

    Raises:
        ApiError: 400, ``text`` is no such number.
    """
    if text is None:
        return LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MAX_LIMIT):
        raise bad_request(f"limit: must be a whole number from 0 to {MAX_LIMIT}", "limit")
    return int(text)


def cut_report(report: StateReport, limit: int) -> dict[str, Any]:
    """One rank's tables, at most ``limit`` entries of each that may be long."""
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
    """What this process holds of requests; ``epoch``: how often ranks were started again."""
    requests = conductor.requests
    return {
        "requests": requests.table(limit),
        "left_out": {"requests": max(len(requests) - limit, 0)},
        "preparing": requests.request_counters.preparing,
        "phase": conductor.phase.name.lower(),
        "draining": conductor.draining,
        "epoch": conductor.epoch,
    }
