"""The routes beside generation: models, health, version, loads and the debug view."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.errors import RequestError
from mstar_tp.frontend.body import parse, read_body
from mstar_tp.frontend.conductor import Phase
from mstar_tp.frontend.context import Frontend
from mstar_tp.frontend.errors import bad_request, no_such_model, printable, unavailable
from mstar_tp.frontend.metrics import exposition
from mstar_tp.frontend.served import ServedAdapter, check_adapter_name
from mstar_tp.version import VERSION


class LoadBody(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: str
    """What requests will call it."""
    lora_path: str
    """Its folder or file, under one of ``engine.lora.roots``."""
    load_inplace: bool = False


class UnloadBody(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: str
    """An adapter that is served."""


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
        conductor = self._frontend.conductor
        if conductor.draining:
            raise unavailable(conductor.reason(), code="draining")
        if conductor.phase is not Phase.READY:
            raise unavailable(conductor.reason(), code=conductor.phase.name.lower())
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json. Needs no key."""
        from mstar_tp.frontend.openapi import document

        return _json(document())

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: counts and gauges in Prometheus' text format. Needs no key."""
        text = exposition(await self._frontend.conductor.measure())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        frontend = self._frontend
        frontend.check_operator(request)
        body = parse(LoadBody, await read_body(request))
        if frontend.config.engine.lora is None:
            raise bad_request(
                "this server serves no adapters: start it with --lora or --lora-root", "lora_name"
            )
        await frontend.load_adapter(body.lora_name, body.lora_path, in_place=body.load_inplace)
        await frontend.state.saved()
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        frontend = self._frontend
        frontend.check_operator(request)
        body = parse(UnloadBody, await read_body(request))
        if body.lora_name in frontend.served.base_names:
            raise bad_request(
                f"lora_name: '{printable(body.lora_name)}' is the base model, which cannot be "
                "unloaded: name an adapter",
                param="lora_name",
            )
        try:
            check_adapter_name(body.lora_name, frontend.served.base_names)
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None
        frontend.conductor.check_open()
        frontend.conductor.loads.unload(body.lora_name)
        await frontend.state.saved()
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def state(self, request: Request) -> Response:
        """GET /debug/state: every rank's tables at one place in the order, and this process's."""
        self._frontend.check_operator(request)
        ranks = await self._frontend.conductor.inspect()
        return _json(
            {"ranks": ranks, "frontend": {"requests": self._frontend.conductor.requests.table()}}
        )

    def _base_card(self, name: str) -> dict[str, Any]:
        served, ready = self._frontend.served, self._frontend.conductor.ready.get(0)
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


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
