"""The routes that manage adapters: load, unload, validate, and where each adapter is."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.common.errors import RequestError
from mstar_tp.config.limits import LimitsConfig, Weight
from mstar_tp.config.section import Positive
from mstar_tp.frontend.adapters.rank_validations import RankValidations, ranks_by_text
from mstar_tp.frontend.adapters.served_models import ServedAdapter, check_adapter_name
from mstar_tp.frontend.api.api_errors import ApiError, bad_request, no_such_model, printable
from mstar_tp.frontend.api.body import MAX_SMALL_BODY_BYTES, Model, parse, read_body
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.wire.reports import Validated
from mstar_tp.wire.states import AdapterState
from mstar_tp.wire.values import AdapterKey

DEFAULT_PAGE, MAX_PAGE = 100, 500
"""Adapters in one answer: a rank's main thread says where each of them is."""

State = Literal["loaded", "available", "refused"]
STATES = ("loaded", "available", "refused")


class LoadBody(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: str
    """The name that requests will use."""
    lora_path: str
    """Its folder or file, under one of ``engine.lora.roots``."""
    load_inplace: bool = False
    """Also where the name is served: new requests get the new weights once every rank took them."""
    pinned: bool | None = None
    """True to never evict it: a slot and space in host memory are kept for it."""
    weight: Weight | None = None
    """Its share of the tokens where adapters take turns (``scheduling_policy: fair``)."""
    max_rows: Positive | None = None
    """The most requests of it that run at once."""
    max_queued: Positive | None = None
    """The most requests of it that the server holds before the answer is 429."""

    def limits(self) -> LimitsConfig:
        """Return what it may take, as far as the request says."""
        return LimitsConfig(
            pinned=self.pinned,
            weight=self.weight,
            max_rows=self.max_rows,
            max_queued=self.max_queued,
        )


class UnloadBody(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: str
    """An adapter that is served."""


class ValidateBody(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_path: str
    """Its folder or file, under one of ``engine.lora.roots``."""
    lora_name: str | None = None
    """The name that requests would use; its folder's by default."""
    load_inplace: bool = False
    """True when a name that is served already is meant to be."""


class ManageRoutes:
    """Handlers that share one frontend. All need an operator's key."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        self._check_operator(request)
        body = await self._read(LoadBody, request)
        self._check_adapters()
        name, path = body.lora_name, body.lora_path
        await self._frontend.load_adapter(
            name, path, in_place=body.load_inplace, limits=body.limits()
        )
        await self._frontend.state.saved()
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        self._check_operator(request)
        frontend = self._frontend
        body = await self._read(UnloadBody, request)
        if body.lora_name in frontend.served.base_names:
            raise bad_request(
                f"lora_name: '{printable(body.lora_name)}' is the base model, which cannot be "
                "unloaded: name an adapter",
                param="lora_name",
            )
        self._check_name(body.lora_name)
        frontend.conductor.state.check_open()
        frontend.conductor.loads.unload(body.lora_name)
        await frontend.state.saved()
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def validate(self, request: Request) -> Response:
        """POST /v1/validate_lora_adapter: says what a load would say, and keeps nothing.

        The answer is 200 for every adapter that could be validated, ``valid`` or not.
        """
        self._check_operator(request)
        frontend = self._frontend
        body = await self._read(ValidateBody, request)
        self._check_adapters()
        name = body.lora_name
        if name is not None:
            self._check_name(name)
        frontend.conductor.state.check_open()
        shown = name or posixpath.basename(body.lora_path.rstrip("/")) or "adapter"
        problems: list[dict[str, Any]] = []
        try:
            path = await asyncio.to_thread(frontend.roots.resolve, body.lora_path)
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None
        try:
            await asyncio.to_thread(frontend.adapter_tokenizers.read, shown, path)
        except RequestError as error:
            problems.append({"message": str(error), "ranks": []})
        told = await frontend.conductor.queries.validate(shown, path)
        problems += _problems(shown, told)
        warnings = _told(told, lambda one: one.warnings)
        if name is not None and frontend.served.get(name) is not None and not body.load_inplace:
            text = f"'{printable(name)}' is served already: a load needs load_inplace"
            warnings.append({"message": text, "ranks": []})
        first = told[0]
        return _json(
            {
                "object": "lora_validation",
                "valid": not problems,
                "lora_name": name,
                "lora_path": path,
                "problems": problems,
                "warnings": warnings,
                "rank": first.lora_rank,
                "targets": first.targets,
                "bytes_per_rank": [one.num_bytes for one in told],
            }
        )

    async def adapters(self, request: Request) -> Response:
        """GET /v1/adapters: every adapter there is, page by page, and where the loaded ones are."""
        self._check_operator(request)
        query = request.query_params
        limit = _limit(query.get("limit"))
        after, state = query.get("after", ""), query.get("state")
        if state is not None and state not in STATES:
            raise bad_request(f"state: must be one of {', '.join(STATES)}", param="state")
        names = self._names(state)
        page = list(islice((name for name in names if name > after), limit + 1))
        shown = page[:limit]
        return _json(
            {
                "object": "list",
                "data": await self._cards(shown),
                "first_id": shown[0] if shown else None,
                "last_id": shown[-1] if shown else None,
                "has_more": len(page) > limit,
                "total": len(names),
            }
        )

    async def adapter(self, request: Request) -> Response:
        """GET /v1/adapters/NAME: one of them."""
        self._check_operator(request)
        name = request.path_params["name"]
        if self._frontend.served.get(name) is None and name not in self._listed():
            raise no_such_model(name)
        (card,) = await self._cards([name])
        return _json(card)

    # ------------------------------------------------------------------ parts

    async def _read(self, model: type[Model], request: Request) -> Model:
        with self._frontend.body_budget.hold() as held:
            return parse(model, await read_body(request, held, MAX_SMALL_BODY_BYTES))

    def _check_operator(self, request: Request) -> None:
        self._frontend.check_operator(request)

    def _check_adapters(self) -> None:
        if self._frontend.config.engine.lora is None:
            raise bad_request(
                "this server serves no adapters: start it with --lora or --lora-root", "lora_name"
            )

    def _check_name(self, name: str) -> None:
        try:
            check_adapter_name(name, self._frontend.served.base_names)
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None

    def _listed(self) -> tuple[str, ...]:
        on_demand = self._frontend.on_demand
        return () if on_demand is None else on_demand.listed

    def _state_of(self, name: str) -> State:
        if self._frontend.served.get(name) is not None:
            return "loaded"
        return "available" if self._refusal(name) is None else "refused"

    def _refusal(self, name: str) -> str | None:
        on_demand = self._frontend.on_demand
        return None if on_demand is None else on_demand.refusal_of(name)

    def _names(self, state: str | None) -> list[str]:
        served = {adapter.key.name for adapter in self._frontend.served.adapters()}
        names = sorted(served.union(self._listed()))
        return [name for name in names if state is None or self._state_of(name) == state]

    async def _cards(self, names: Sequence[str]) -> list[dict[str, Any]]:
        served = [self._frontend.served.get(name) for name in names]
        keys = [adapter.key for adapter in served if adapter is not None]
        places = await self._places(keys)
        return [
            self._card(name, adapter, places) for name, adapter in zip(names, served, strict=True)
        ]

    async def _places(self, keys: Sequence[AdapterKey]) -> Mapping[AdapterKey, list[Any]]:
        """Return where each adapter is, a rank and stage each; nothing while no ranks serve."""
        conductor = self._frontend.conductor
        places: dict[AdapterKey, list[Any]] = {}
        if not keys or not conductor.state.serves:
            return places
        try:
            told = await conductor.queries.locate(keys)
        except ApiError:  # the ranks went away meanwhile
            return places
        for report in told:
            for state in report.adapters:
                places.setdefault(state.adapter, []).append(_place(report.rank, state))
        return places

    def _card(
        self,
        name: str,
        adapter: ServedAdapter | None,
        places: Mapping[AdapterKey, list[Any]],
    ) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "adapter", "state": self._state_of(name)}
        if adapter is None:
            return card | {"cause": self._refusal(name)}
        origin = "configured" if adapter.configured else "loaded"
        return card | {
            "origin": "on_demand" if adapter.on_demand else origin,
            "root": adapter.path,
            "created": adapter.created,
            "generation": adapter.key.generation,
            "digest": adapter.digest,
            "requests": self._frontend.conductor.requests.count_of(adapter.key),
            "residency": places.get(adapter.key, []),
        }


def _place(rank: int, state: AdapterState) -> dict[str, Any]:
    """Return where an adapter is on one rank: ``tier`` says it in one word."""
    fields = msgspec.structs.asdict(state)
    del fields["adapter"]
    if not state.stage:
        del fields["stage"]
    return {"rank": rank, "tier": state.place, **fields}


def _problems(name: str, told: Sequence[Validated]) -> list[dict[str, Any]]:
    """Return what ranks hold against the adapter; or that it is not one adapter on all of them."""
    problems = _told(
        told, lambda one: [RankValidations.reason(name, text) for text in one.problems]
    )
    found = ranks_by_text((one.rank, f"{one.lora_rank} {one.targets}") for one in told)
    if not problems and len(found) > 1:
        text = "it is not the same on every rank: make the files equal"
        problems.append({"message": text, "ranks": [one.rank for one in told]})
    return problems


def _told(told: Sequence[Validated], of: Any) -> list[dict[str, Any]]:
    """Each text once, with the ranks that say it."""
    texts = ranks_by_text((one.rank, text) for one in told for text in of(one))
    return [{"message": text, "ranks": ranks} for text, ranks in texts.items()]


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_PAGE
    if not text.isdecimal() or not text.isascii() or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise bad_request(f"limit: must be a whole number from 1 to {MAX_PAGE}", param="limit")
    return int(text)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
