"""GET /openapi.json: the API as it is, made of the very models that check requests.

What a document cannot say (that a prompt fits the context, or that a model is served) is a 400 or
404 whose body is described here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from mstar_tp.common.version import VERSION
from mstar_tp.frontend.api.adapter_routes import (
    DEFAULT_PAGE,
    MAX_PAGE,
    STATES,
    LoadBody,
    UnloadBody,
    ValidateBody,
)
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.api.responses import ResponsesRequest
from mstar_tp.frontend.api.text_routes import DetokenizeBody, TokenizeBody

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the path of the field"},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
FAILURES = {
    400: "the request is at fault; param says where",
    401: "no valid key",
    403: "the key may not do that",
    404: "no such model or adapter",
    408: "the request did not come in time",
    413: "the body is too large",
    429: "its adapter holds as many requests as it may: see Retry-After",
    500: "the request failed on the server",
    503: "not now: see Retry-After",
}
_PAGE: dict[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "after": {"type": "string"},
    "state": {"type": "string", "enum": list(STATES)},
}
_OBJECT: dict[str, Any] = {"type": "object"}


def document() -> dict[str, Any]:
    """The document, as plain JSON values."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths = {
        "/v1/completions": _post("Complete prompts", CompletionRequest, schemas, streams=True),
        "/v1/chat/completions": _post("Answer a chat", ChatRequest, schemas, streams=True),
        "/v1/responses": _post("Answer an input", ResponsesRequest, schemas, streams=True),
        "/v1/embeddings": {
            "post": {
                "summary": "Not served",
                "requestBody": _json_body(_OBJECT),
                "responses": {"400": _failure("not served"), "401": _failure(FAILURES[401])},
            }
        },
        "/tokenize": _post("The tokens of a text", TokenizeBody, schemas),
        "/detokenize": _post("The text of tokens", DetokenizeBody, schemas),
        "/v1/models": _get("The base model and every adapter"),
        "/v1/load_lora_adapter": _post("Serve an adapter", LoadBody, schemas, text=True),
        "/v1/unload_lora_adapter": _post("Serve one no longer", UnloadBody, schemas, text=True),
        "/v1/validate_lora_adapter": _post("Validate an adapter", ValidateBody, schemas),
        "/v1/adapters": _get("Every adapter, and where it is", query=_PAGE),
        "/health": _get("Whether requests are served"),
        "/ping": _get("Whether requests are served"),
        "/version": _get("The code version"),
        "/debug/summary": _get("What the status page shows, of bounded size"),
        "/metrics": _get("Counts for Prometheus", "text/plain"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mstar_tp", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(
    summary: str,
    body: type[BaseModel],
    schemas: dict[str, Any],
    *,
    streams: bool = False,
    text: bool = False,
) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    content: dict[str, Any] = {"text/plain" if text else "application/json": {}}
    if streams:
        content["text/event-stream"] = {}
    return {
        "post": {
            "summary": summary,
            "requestBody": _json_body({"$ref": f"#/components/schemas/{body.__name__}"}),
            "responses": {"200": {"description": "done", "content": content}, **_failures()},
        }
    }


def _get(
    summary: str, kind: str = "application/json", query: dict[str, Any] | None = None
) -> dict[str, Any]:
    """``query``: parameter -> its schema."""
    done = {"description": "done", "content": {kind: {}}}
    codes = ("401", "403", "503") if query is None else ("400", "401", "403", "503")
    failures = {code: of for code, of in _failures().items() if code in codes}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": done, **failures}}
    if query is not None:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in query.items()
        ]
    return {"get": operation}


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _failures() -> dict[str, Any]:
    return {str(code): _failure(text) for code, text in FAILURES.items()}


def _failure(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
