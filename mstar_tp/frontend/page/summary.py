"""The answer to GET /debug/summary, bounded, for a page that polls. The event loop's thread.

However many adapters are served and clients watch, an answer holds at most ``MAX_SHOWN`` adapters,
and the ranks' tables are asked for once in ``TABLES_LAST_S`` for all who watch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.common.histogram import Histogram
from mstar_tp.common.version import VERSION
from mstar_tp.frontend.adapters.served_models import ServedAdapter
from mstar_tp.frontend.api.api_errors import ApiError, bad_request
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.metrics.adapter_counts import BASE, OTHER, AdapterCounts
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.metrics.server_metrics import Snapshot
from mstar_tp.wire.states import AdapterState, SlotState, StageState, StateReport
from mstar_tp.wire.values import AdapterKey

MAX_SHOWN = 200
"""The most adapters in one answer."""
SHOWN = 50
"""The adapters in one answer, unless asked for another number."""
MAX_SEARCH_CHARS = 256
_RANK_FIELDS = (
    *("rank", "steps", "preemptions", "waiting", "running", "requests"),
    *("pages_used", "pages_total", "kv_host", "prefix", "lora", "process"),
)
TABLES_LAST_S = 1.0
"""The age in seconds of the ranks' tables in an answer, beside the wait for a step."""
TABLES_WITHIN_S = 2.0
"""The seconds after which an answer goes without the tables of ranks that are silent."""


class SummaryRoute:
    """The handler, and the tables that its callers share."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._started = time.monotonic()
        self._asked: asyncio.Task[list[StateReport]] | None = None
        self._asked_at = 0.0

    async def answer(self, request: Request) -> Response:
        """GET /debug/summary?search=TEXT&limit=N."""
        frontend = self._frontend
        frontend.check_operator(request)
        search = request.query_params.get("search", "")[:MAX_SEARCH_CHARS]
        limit = _limit(request.query_params.get("limit", str(SHOWN)))
        snapshot, tables = await asyncio.gather(frontend.conductor.measure(), self._tables())
        summary = {
            **self._server(snapshot),
            "requests": _requests(snapshot),
            "latency": {
                "first": _histogram(snapshot.request_counters.first_token_s),
                "between": _histogram(snapshot.request_counters.next_token_s),
            },
            "ranks": _ranks(snapshot),
            "stages": slots_by_stage(tables),
            "adapters": self._adapters(tables, snapshot.request_counters, search, limit),
        }
        return Response(
            msgspec.json.encode(summary),
            media_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def _tables(self) -> list[StateReport]:
        """Return the ranks' tables, at most ``TABLES_LAST_S`` old; none while ranks are silent."""
        conductor = self._frontend.conductor
        if not conductor.state.serves:
            return []
        now = time.monotonic()
        asked = self._asked
        if asked is None or (asked.done() and now - self._asked_at > TABLES_LAST_S):
            self._asked = asked = asyncio.ensure_future(conductor.queries.inspect())
            self._asked_at = now
        try:
            # One who leaves, or waits no longer, takes nothing from those who still wait.
            return await asyncio.wait_for(asyncio.shield(asked), TABLES_WITHIN_S)
        except (ApiError, TimeoutError):
            return []

    def _server(self, snapshot: Snapshot) -> dict[str, Any]:
        frontend = self._frontend
        state = frontend.conductor.state
        phase = "draining" if state.draining else state.service.name.lower()
        return {
            "version": VERSION,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "model": frontend.served.base_names[0],
            "chats": frontend.tokenizer.chat_template is not None,
            "phase": phase,
            "reason": None if snapshot.ready else state.reason(),
            "restarts": snapshot.restarts,
            "world_size": snapshot.world_size,
            "max_queue": frontend.config.server.max_queue,
        }

    def _adapters(
        self,
        tables: Sequence[StateReport],
        request_counters: RequestCounters,
        search: str,
        limit: int,
    ) -> dict[str, Any]:
        """Return the served adapters whose name holds ``search``, the first ``limit`` at length.

        Adapters in slots come first, then those in the CPU cache.
        """
        wanted = search.casefold()
        found = [a for a in self._frontend.served.adapters() if wanted in a.key.name.casefold()]
        places, counted = _Places(tables), dict(request_counters.by_adapter.labelled())
        for label in (BASE, OTHER):
            del counted[label]
        order = sorted(range(len(found)), key=lambda i: places.place(found[i].key))
        return {
            "total": self._frontend.served.num_adapters,
            "matching": len(found),
            "shown": [
                places.describe(found[i], counted.get(found[i].key.name))
                for i in islice(order, limit)
            ],
        }


class _Places:
    """The place that rank 0 has each adapter at."""

    def __init__(self, tables: Sequence[StateReport]) -> None:
        self._known = bool(tables)
        self._slots: dict[AdapterKey, SlotState] = {}
        self._host: set[AdapterKey] = set()
        self._failed: dict[AdapterKey, str] = {}
        self._states: dict[AdapterKey, list[AdapterState]] = {}
        """adapter -> its states, one a stage, where a rank reports any."""
        if not tables:
            return
        for stage in _of_stages(tables[0]):
            self._host.update(stage.cpu_cache)
            self._slots.update((s.adapter, s) for s in stage.slots if s.adapter is not None)
        for state in tables[0].adapters:
            self._states.setdefault(state.adapter, []).append(state)
        for read in tables[0].failed_reads:
            self._failed[read.adapter] = f"rank {read.rank}: {read.cause}"

    def place(self, key: AdapterKey) -> int:
        return 0 if key in self._slots else 1 if key in self._host else 2

    def describe(self, adapter: ServedAdapter, counts: AdapterCounts | None) -> dict[str, Any]:
        key, slot = adapter.key, self._slots.get(adapter.key)
        where = ("device", "host", "disk")[self.place(key)]
        if where == "disk" and key in self._failed:
            where = "failed"
        states = self._states.get(key, ())
        if where == "host" and any(state.host == "reading" for state in states):
            where = "reading"
        return {
            "name": key.name,
            "where": where if self._known else None,
            "slot": None if slot is None else slot.slot,
            "requests": 0 if slot is None else len(slot.holders),
            "answered": None if counts is None else sum(counts.outcomes.values()),
            "cause": self._failed.get(key),
            **_stats(states),
        }


def _stats(states: Sequence[AdapterState]) -> dict[str, int]:
    """Return one adapter's stats over the model's stages: a request counts once in each."""
    if not states:
        return {}
    return {
        "bytes": sum(state.num_bytes for state in states),
        "hits": max(state.hits for state in states),
        "evictions": max(state.evictions for state in states),
        "waiting": max(state.waiting for state in states),
    }


def _limit(text: str) -> int:
    fits = text.isascii() and text.isdigit() and len(text) < 9
    if not fits or int(text) > MAX_SHOWN:
        raise bad_request(f"limit: must be a whole number from 0 to {MAX_SHOWN}", "limit")
    return int(text)


def _requests(snapshot: Snapshot) -> dict[str, Any]:
    request_counters = snapshot.request_counters
    return {
        "live": snapshot.live,
        "outcomes": {outcome.value: count for outcome, count in request_counters.outcomes.items()},
        "prompt_tokens": request_counters.prompt_tokens,
        "generated_tokens": request_counters.generated_tokens,
    }


def _ranks(snapshot: Snapshot) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = []
    for rank in range(snapshot.world_size):
        stats = snapshot.ranks.get(rank)
        if stats is None:
            ranks.append({"rank": rank, "answered": False})
            continue
        told = msgspec.to_builtins(stats)
        kept = {name: told[name] for name in _RANK_FIELDS if name in told}
        ranks.append({"answered": True, **kept})
    return ranks


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Return bounds in seconds, and counts since the start; the last is past all bounds."""
    return {"bounds": histogram.bounds, "counts": histogram.buckets().counts}


def _of_stages(report: StateReport) -> list[StageState]:
    stages = list(report.other_stages)
    if report.host is not None:
        stages.append(
            StageState(stage="", slots=report.slots, cpu_cache=report.cpu_cache, host=report.host)
        )
    return stages


def slots_by_stage(tables: Sequence[StateReport]) -> list[dict[str, Any]]:
    """Return the slots of each stage, once for all ranks whose slots are equal."""
    stages: dict[str, dict[tuple[SlotState, ...], list[int]]] = {}
    for report in tables:
        for stage in _of_stages(report):
            stages.setdefault(stage.stage, {}).setdefault(stage.slots, []).append(report.rank)
    return [
        {
            "stage": name,
            "groups": [
                {"ranks": ranks, "slots": [_slot(slot) for slot in slots]}
                for slots, ranks in groups.items()
            ],
        }
        for name, groups in stages.items()
    ]


def _slot(slot: SlotState) -> dict[str, Any]:
    return {
        "slot": slot.slot,
        "adapter": None if slot.adapter is None else slot.adapter.name,
        "requests": len(slot.holders),
    }
