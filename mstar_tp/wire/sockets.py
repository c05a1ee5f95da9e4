"""Sockets as this package uses them, the wake of a polling thread, and the watch over connections.

Heartbeats run on ZeroMQ's own I/O thread, which nothing in Python can block: a peer that is killed,
stopped or cut off is reported as a closed connection within ``HEARTBEAT_MS + SILENCE_MS``.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 500
SILENCE_MS = 4000
PULSE_AFTER_S = 1.0
"""The seconds of silence after which a stream gets a frame that says nothing.

It can take twice as long. Were the last frame lost, only a next one would show it.
"""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
MAX_FRAME_BYTES = 64 * 2**20
"""A peer that sends more at once is cut off; a prompt of ten million tokens fits."""

_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES

WAKE = b""
"""An empty frame: says nothing, makes a poll return."""


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket whose sends never block (no high-water mark) and whose peers are heard or lost."""
    socket = context.socket(kind)
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = SILENCE_MS
    socket.heartbeat_ttl = SILENCE_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    return socket


class Wake:
    """Makes a thread that polls ``socket`` look up, from any thread: an empty frame reaches it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """On the thread that owns ``socket``."""
        endpoint = f"inproc://wake-{uuid.uuid4().hex}"
        socket.bind(endpoint)
        self._lock = threading.Lock()
        self._socket = socket.context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)

    def wake(self) -> None:
        """Any thread; never blocks; a no-op after close."""
        with self._lock:
            if self._socket.closed:
                return
            try:
                self._socket.send(WAKE, zmq.NOBLOCK)
            except zmq.Again:
                # Full of wakes that nobody has looked up for yet: one more says nothing new.
                return

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class ConnectionEvent(NamedTuple):
    """Something happened to a connection of the ``socket_no``-th watched socket."""

    socket_no: int
    kind: str
    """``accepted``, ``up`` (its handshake is done), ``closed``, or ``refused`` (it failed)."""
    fd: int
    """Its descriptor: of those that are accepted or closed."""


class ConnectionWatch:
    """Reads the monitors of some sockets on a thread of its own, so that losses are always noticed.

    ``handle`` runs under ``lock``, on the watch's thread or in ``settle``; ``after`` runs without
    it, on the watch's thread, when ``handle`` has seen something. ``tick`` runs there every
    ``PULSE_AFTER_S``. ``lock`` is a leaf.
    """

    def __init__(
        self,
        sockets: Sequence[zmq.Socket[bytes]],
        *,
        name: str,
        handle: Callable[[ConnectionEvent], None],
        after: Callable[[], None],
        tick: Callable[[], None],
    ) -> None:
        """On the thread that owns ``sockets``, before they bind or connect."""
        self.lock = threading.Lock()
        self._sockets = sockets
        self._handle = handle
        self._after = after
        self._tick = tick
        self._monitors = [_attach_monitor(socket) for socket in sockets]
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Handle all that has happened to the connections up to now. The caller holds ``lock``."""
        self._drain()

    def close(self) -> None:
        """Stop the thread and the monitors, before the sockets close. On their owner's thread."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        for socket, monitor in zip(self._sockets, self._monitors, strict=True):
            socket.monitor(None, 0)
            monitor.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        for monitor in self._monitors:
            poll.register(monitor.fileno(), select.POLLIN)
        due = time.monotonic() + PULSE_AFTER_S
        while True:
            # A monitor's descriptor signals an edge: read it until it is empty, before each wait.
            with self.lock:
                seen = self._drain()
            if seen:
                self._after()
            left_s = due - time.monotonic()
            if left_s <= 0:
                self._tick()
                due = time.monotonic() + PULSE_AFTER_S
            elif any(fd == self._stop_read for fd, _ in poll.poll(int(left_s * 1e3) + 1)):
                return

    def _drain(self) -> bool:
        seen = False
        for index, monitor in enumerate(self._monitors):
            while has_arrivals(monitor):
                message = recv_monitor_message(monitor, zmq.NOBLOCK)
                self._handle(ConnectionEvent(index, _kind(message["event"]), message["value"]))
                seen = True
        return seen


class Tail:
    """The state of a stream's last frame: has it stood alone for a while?

    Counts are of frames sent; ``confirmed`` are followed by one, or need none.
    """

    def __init__(self, confirmed: int = 0) -> None:
        self._seen = -1
        self.confirmed = confirmed

    def is_alone(self, sent: int) -> bool:
        """At each tick."""
        before, self._seen = self._seen, sent
        return sent == before and sent != self.confirmed


def has_arrivals(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a receive would find something.

    On the thread that owns ``socket``.
    """
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _attach_monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    endpoint = f"inproc://monitor-{uuid.uuid4().hex}"
    socket.monitor(endpoint, _WATCHED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(endpoint)
    return monitor


def _kind(event: int) -> str:
    if event == zmq.EVENT_ACCEPTED:
        return "accepted"
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "up"
    return "refused" if event & _FAILURES else "closed"


class ConnectionTable:
    """Descriptors of accepted connections, and the peers whose connection has closed.

    Every method is called under the watch's lock.
    """

    def __init__(self) -> None:
        self._accepted: set[int] = set()
        self._by_fd: dict[int, bytes] = {}
        self.closed: list[bytes] = []
        """Peers whose connections have closed, and that nobody has taken note of."""

    def handle(self, event: ConnectionEvent) -> None:
        """Take note of an event of the socket."""
        if event.kind == "accepted":
            self._accepted.add(event.fd)
        elif event.kind == "closed":
            self._accepted.discard(event.fd)
            peer = self._by_fd.pop(event.fd, None)
            if peer is not None:
                self.closed.append(peer)

    def is_accepted(self, fd: int) -> bool:
        """Return whether the descriptor is an open connection."""
        return fd in self._accepted

    def track(self, peer: bytes, fd: int) -> None:
        """Report ``peer`` as closed once ``fd`` closes; whoever had ``fd`` before has closed."""
        before = self._by_fd.get(fd)
        if before is not None:
            self.closed.append(before)
        self._by_fd[fd] = peer

    def take_closed(self) -> list[bytes]:
        """Return the peers that have closed, once."""
        closed, self.closed = self.closed, []
        return closed
