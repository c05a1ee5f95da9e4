"""The status page at ``/``: a few small files of this package, without the server's data.

The page fetches the data that it shows, with the key that its reader types in where one is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    "index.html",
    "style.css",
    "icon.svg",
    "page.js",
    "dom.js",
    "panels.js",
    "charts.js",
    "try.js",
)
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and no text that becomes markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    data: bytes
    headers: dict[str, str]


def page_routes() -> list[Route]:
    """Return the routes of ``/`` and of the files that it names."""
    folder = files("mstar_tp.frontend.page") / "assets"
    routes = []
    for name in _FILES:
        data = (folder / name).read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        kind = _TYPES[name.rpartition(".")[2]]
        file = _File(data, {**_HEADERS, "ETag": tag, "Content-Type": kind})
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.append(Route(path, _endpoint(file), methods=["GET"]))
    return routes


def _endpoint(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if file.headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=file.headers)
        return Response(file.data, headers=file.headers)

    return answer
