"""The frontend's end of the conductor channel, on its asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

import zmq

from mstar_tp.common.errors import WireError
from mstar_tp.wire.address import Bind
from mstar_tp.wire.channel_server import Lost, Server
from mstar_tp.wire.codec import Codec
from mstar_tp.wire.commands import ConductorMessage
from mstar_tp.wire.handshake import Ack, Heartbeat, Hello
from mstar_tp.wire.reports import RankReport
from mstar_tp.wire.sockets import has_arrivals

logger = logging.getLogger(__name__)

OUTBOX_FRAMES = 512
OUTBOX_BYTES = 64 << 20
"""The most bytes that may be on their way to a rank before the outbox is full.

Ranks tell what they have taken after fewer frames and bytes, so that it never stays full.
"""


class FrontendLink:
    """One numbered stream to every rank, and every rank's reports. The loop's thread owns it.

    ``send_all`` may be called from any thread: from another than the loop's it is handed over.
    The socket's descriptor signals an edge that a send may swallow, so every send looks for reads.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bind: Bind, hello: Hello) -> None:
        """``hello``: what every rank's must say, but for its rank. No I/O before ``start``."""
        codec: Codec[RankReport | Hello | Heartbeat | Ack] = Codec(
            RankReport, Hello, Heartbeat, Ack
        )
        self._server: Server[RankReport, ConductorMessage] = Server(
            context, bind, hello, range(hello.world_size), codec=codec, strict=False
        )
        self._items: deque[tuple[int, RankReport | Lost]] = deque()
        self._arrived = asyncio.Event()
        self._connected = asyncio.Event()
        self._closed = False
        self._was_full = False
        self.on_capacity: Callable[[], None] = lambda: None
        """Called on the loop when the outbox, seen to be full, is so no more."""

    @property
    def outbox_full(self) -> bool:
        """Return whether much of what was sent has not been taken by some rank.

        Sends go on in any case: it is for those who can wait. On the loop.
        """
        frames, size = self._server.backlog()
        self._was_full = frames >= OUTBOX_FRAMES or size >= OUTBOX_BYTES
        return self._was_full

    @property
    def address(self) -> str:
        """Return where ranks connect; after ``start``."""
        return self._server.address

    @property
    def epoch(self) -> int:
        return self._server.epoch

    def start(self) -> None:
        """Listen. On the loop.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._server.open()
        self._fd = self._server.socket.fileno()
        self._loop.add_reader(self._fd, self._on_readable)
        self._on_readable()

    def begin_epoch(self) -> None:
        """The ranks are started anew: forget the old ones, expect the next group. On the loop.

        Reports that nobody has received yet stay in their place.
        """
        self._connected.clear()
        self._server.begin_epoch()
        self._on_readable()

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until every rank of this epoch is connected.

        Raises:
            WireError: naming the ranks that were not within ``timeout_s``.
        """
        try:
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in self._server.missing)
            raise WireError(
                f"the frontend waited {timeout_s:g} s at {self.address} for the hello of "
                f"rank {missing}: look for its error above"
            ) from None

    def send_all(self, message: ConductorMessage) -> None:
        """Send one numbered message, the same to every rank. Any thread; never blocks."""
        if threading.get_ident() == self._thread:
            self._send(message)
        else:
            self._loop.call_soon_threadsafe(self._send, message)

    async def receive(self) -> tuple[int, RankReport | Lost]:
        """The next report and its rank; a ``Lost`` is the last that a rank's epoch brings."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def take_received(self) -> list[tuple[int, RankReport | Lost]]:
        """Return what has arrived and nobody has received yet; never waits.

        On the loop.
        """
        items = list(self._items)
        self._items.clear()
        return items

    def close(self) -> None:
        """Stop listening and remove the address. On the loop; idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._server.close()

    def _send(self, message: ConductorMessage) -> None:
        if self._closed:
            logger.debug("dropped a %s: the link is closed", type(message).__name__)
            return
        self._server.send_all(message)
        self._look_again()

    def _on_readable(self) -> None:
        if self._closed:
            return
        self._items.extend(self._server.receive())
        if self._items:
            self._arrived.set()
        if not self._connected.is_set() and not self._server.missing:
            self._connected.set()
            logger.info("every rank is here")
        if self._was_full and not self.outbox_full:
            self.on_capacity()
        self._look_again()

    def _look_again(self) -> None:
        if has_arrivals(self._server.socket):
            self._loop.call_soon(self._on_readable)
