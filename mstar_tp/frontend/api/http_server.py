"""The API's HTTP server on an event loop that belongs to somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from mstar_tp.common.errors import ConfigError
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.api.gate import Check, gated, max_connections

BACKLOG = 2048
KEEP_ALIVE_S = 120
"""The seconds for which an idle connection stays open.

Clients and proxies keep theirs for less (5 to 90 s). Closed sooner, a connection can close under a
request that a client is just sending on it.
"""
LAST_WORDS_S = 5
"""The seconds that the last answers may take to leave, once the server stops."""


def open_listener(host: str, port: int) -> socket.socket:
    """A socket bound to ``host``:``port`` and kept, so that nobody else can take it meanwhile.

    Raises:
        ConfigError: the address is no address of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host: {host!r} is not an address: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port: cannot listen on {host} port {port}: {error.strerror}: "
            "choose another with --port (0 takes a free one)"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return where clients reach ``listener``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiServer:
    """Serves one application from ``start`` to ``stop``. Leaves signals to its owner."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        check: Check,
        refused: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        """Take the application.

        ``check`` says whether requests for tokens are taken now; ``refused`` is told of those that
        were turned away before the application saw them.
        """
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                http=gated(check, max_connections(), refused),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer requests from now on. On the loop."""
        self._task = asyncio.ensure_future(self._server.serve([self._listener]))

    async def stop(self) -> None:
        """Take no more connections, and wait a little for the last answers to leave."""
        if self._task is None:
            self._listener.close()
            return
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the supervisor's."""
        yield
