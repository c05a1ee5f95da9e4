"""The routes beside generation: models, health, version, metrics and the debug view."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.common.version import VERSION
from mstar_tp.frontend.adapters.served_models import ServedAdapter
from mstar_tp.frontend.api.api_errors import no_such_model, unavailable
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.metrics.server_metrics import exposition
from mstar_tp.frontend.page.debug_state import cut_report, limit_of, own_state


class OperateRoutes:
    """Handlers that share one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def models(self, request: Request) -> Response:
        """GET /v1/models: what the request's key may name of it."""
        access, served = self._frontend.client(request), self._frontend.served
        base = served.base_names
        cards = [self._base_card(name) for name in base if access.allows(name, base)]
        cards += [
            self._adapter_card(adapter)
            for adapter in served.adapters()
            if access.allows(adapter.key.name, base)
        ]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: the base or one adapter."""
        access, served = self._frontend.client(request), self._frontend.served
        name = request.path_params["name"]
        access.check(name, served.base_names)
        if name in served.base_names:
            return _json(self._base_card(name))
        adapter = served.get(name)
        if adapter is None:
            raise no_such_model(name)
        return _json(self._adapter_card(adapter))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while requests are served, else 503 and why not."""
        state = self._frontend.conductor.state
        if state.refusal_code is not None:
            raise unavailable(state.reason(), code=state.refusal_code)
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: this API as a document. Needs no key."""
        from mstar_tp.frontend.api.openapi import document

        return _json(document())

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: counts and gauges in Prometheus' text format. Needs no key."""
        text = exposition(await self._frontend.conductor.measure())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def state(self, request: Request) -> Response:
        """GET /debug/state: every rank's tables at one place in the order, and this process's.
        Lists of adapters are cut at ``limit``.
        """
        self._frontend.check_operator(request)
        limit = limit_of(request.query_params.get("limit"))
        conductor, served = self._frontend.conductor, self._frontend.served
        on_demand = self._frontend.on_demand
        ranks = [cut_report(report, limit) for report in await conductor.queries.inspect()]
        adapters = {
            "served": served.num_adapters,
            "on_demand": served.num_on_demand,
            "listed": 0 if on_demand is None else len(on_demand.listed),
        }
        frontend = {**own_state(conductor, limit), "adapters": adapters}
        return _json({"ranks": ranks, "frontend": frontend})

    def _base_card(self, name: str) -> dict[str, Any]:
        served, ready = self._frontend.served, self._frontend.conductor.group.ready.get(0)
        extra: dict[str, Any] = {"root": served.root, "parent": None}
        if ready is not None:
            extra["max_model_len"] = ready.max_model_len
        return _card(name, served.created, extra)

    def _adapter_card(self, adapter: ServedAdapter) -> dict[str, Any]:
        first = self._frontend.served.base_names[0]
        extra: dict[str, Any] = {"root": adapter.path, "parent": first}
        if adapter.digest is not None:
            extra["digest"] = adapter.digest
        return _card(adapter.key.name, adapter.created, extra)


def _card(name: str, created: int, extra: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "mstar-tp", **extra}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
