"""The ASGI application: routes, and every failure as OpenAI's error shape."""

from __future__ import annotations

import logging
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mstar_tp.frontend.api.adapter_routes import ManageRoutes
from mstar_tp.frontend.api.api_errors import ApiError, printable
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.api.generate_routes import GenerateEndpoint
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.api.request_ids import NamedRequests, log_ended
from mstar_tp.frontend.api.responses import ResponsesRequest
from mstar_tp.frontend.api.server_routes import OperateRoutes
from mstar_tp.frontend.api.text_routes import TextRoutes
from mstar_tp.frontend.page.status_page import page_routes
from mstar_tp.frontend.page.summary import SummaryRoute

logger = logging.getLogger(__name__)


def build_app(frontend: Frontend) -> ASGIApp:
    """The application that serves ``frontend``."""
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _nobody,
        Exception: _crash,
    }
    logs = frontend.config.server.enable_log_requests
    if logs:
        frontend.conductor.requests.on_ended.append(lambda ended, _: log_ended(ended))
    app = Starlette(routes=all_routes(frontend), exception_handlers=handlers)
    return NamedRequests(app, logs=logs)


def all_routes(frontend: Frontend) -> list[Route]:
    """Every route that there is; also what the docs list."""
    operate, texts = OperateRoutes(frontend), TextRoutes(frontend)
    manage = ManageRoutes(frontend)
    get, post = ["GET"], ["POST"]
    return [
        Route("/v1/completions", GenerateEndpoint(frontend, CompletionRequest), methods=post),
        Route("/v1/chat/completions", GenerateEndpoint(frontend, ChatRequest), methods=post),
        Route("/v1/responses", GenerateEndpoint(frontend, ResponsesRequest), methods=post),
        Route("/v1/embeddings", texts.embeddings, methods=post),
        Route("/tokenize", texts.tokenize, methods=post),
        Route("/detokenize", texts.detokenize, methods=post),
        Route("/ping", operate.health, methods=[*get, *post]),
        Route("/v1/models", operate.models, methods=get),
        Route("/v1/models/{name:path}", operate.model, methods=get),
        Route("/v1/load_lora_adapter", manage.load, methods=post),
        Route("/v1/unload_lora_adapter", manage.unload, methods=post),
        Route("/v1/validate_lora_adapter", manage.validate, methods=post),
        Route("/v1/adapters", manage.adapters, methods=get),
        Route("/v1/adapters/{name:path}", manage.adapter, methods=get),
        Route("/health", operate.health, methods=get),
        Route("/version", operate.version, methods=get),
        Route("/metrics", operate.metrics, methods=get),
        Route("/openapi.json", operate.openapi, methods=get),
        Route("/debug/state", operate.state, methods=get),
        Route("/debug/summary", SummaryRoute(frontend).answer, methods=get),
        *page_routes(),
    ]


def _api_error(_: Request, error: Exception) -> Response:
    return _response(cast(ApiError, error))


def _http_error(request: Request, error: Exception) -> Response:
    """Return what the router itself refuses: an unknown route, or a method a route has not."""
    failure = cast(HTTPException, error)
    what = f"{request.method} {printable(request.url.path)}"
    messages = {
        404: f"there is no route {what}",
        405: f"{what}: this route does not take that method",
    }
    message = messages.get(failure.status_code, str(failure.detail))
    return _response(ApiError(failure.status_code, message, headers=failure.headers))


def _nobody(_: Request, __: Exception) -> Response:
    """Its client is gone: what is answered goes nowhere."""
    return Response(status_code=400)


def _crash(_: Request, __: Exception) -> Response:
    """A fault of ours; the traceback goes to the log, never to the client."""
    return _response(ApiError(500, "the server failed on this request: see its log"))


def _response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers, media_type="application/json"
    )
