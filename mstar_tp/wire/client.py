"""The connecting end of a channel: what a rank has to the frontend, and a follower to the leader.

Two sockets: one that the owner's thread reads, one that any thread sends on. Neither ever blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec
import zmq

from mstar_tp.common.errors import WireError
from mstar_tp.wire.codec import Codec, StreamNumbers, Tamper, encode
from mstar_tp.wire.curve import Curve
from mstar_tp.wire.handshake import Ack, Heartbeat, Hello, Refused, Welcome
from mstar_tp.wire.sockets import WAKE, ConnectionEvent, ConnectionWatch, Tail, Wake, open_socket

logger = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")

LINGER_MS = 2000
"""The time that close may go on sending a last report."""

HELLO_AGAIN_MS = 250
"""The time after which a hello is said again when its connection broke."""

ACK_EVERY_FRAMES = 64
ACK_EVERY_BYTES = 4 << 20
"""A rank tells the frontend what it has taken after so many frames or bytes more."""

_LINKS: tuple[Literal["receive", "send"], ...] = ("receive", "send")


class Client(Generic[In, Out]):
    """One peer's end. ``start``, ``receive``, ``close``: owner's thread; ``send``: any thread.

    ``on_lost`` is called once, on the watch's thread, as soon as the server is lost; ``lost`` says
    so on the owner's thread, once ``receive`` has given out all that had arrived before.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        *,
        server: str,
        codec: Codec[In | Welcome | Refused | Heartbeat],
        curve: Curve | None = None,
        on_lost: Callable[[str], None] | None = None,
        tamper: Tamper | None = None,
        arrivals: Tamper | None = None,
        sends_acks: bool = False,
    ) -> None:
        """Take what the client needs; there is no I/O before ``start``.

        ``server`` is how messages call the other end; ``tamper`` (with what is sent) and
        ``arrivals`` (with what comes) are a test's. ``sends_acks``: the server wants to know how
        much was taken.
        """
        self._context = context
        self._address = address
        self._hello = hello
        self._server = f"{server} at {address}"
        self._codec = codec
        self._curve = curve
        self._on_lost = on_lost
        self._tamper = tamper
        self._arrivals = arrivals
        self._sends_acks = sends_acks
        self._received = self._acked = Ack(frames=0, size=0)
        """What this end has taken, and what of it the server knows. Owner's thread."""
        self._numbers: StreamNumbers
        self.epoch: int
        """As the server counts groups. After ``start``."""
        self._send_lock = threading.Lock()  # guards _sender, _sent and _tail; a leaf
        self._sent = 0
        self._tail = Tail()
        # Guarded by the watch's lock:
        self._up = [False, False]
        self._dropped: set[int] = set()
        self._refusals = 0
        self._welcomed = False
        self._cause: str | None = None
        self._notified = False
        self.lost: str | None = None
        """Why the server is gone; set by ``receive``. Owner's thread."""
        self._started = False
        self._wake: Wake | None = None

    @property
    def poll_socket(self) -> zmq.Socket[bytes]:
        """Readable when ``receive`` has something to say, a loss included. After ``start``."""
        return self._receiver

    def start(self, timeout_s: float) -> None:
        """Connect, say hello on both connections, and wait to be welcomed.

        Raises:
            WireError: refused (and why), or no answer within ``timeout_s``. Everything is closed.
        """
        self._receiver = open_socket(self._context, zmq.DEALER)
        self._sender = open_socket(self._context, zmq.DEALER)
        sockets = (self._receiver, self._sender)
        self._watch = ConnectionWatch(
            sockets,
            name=self._server,
            handle=self._handle,
            after=self._after,
            tick=self._follow_tail,
        )
        self._started = True
        try:
            for index, socket in enumerate(sockets):
                if self._curve is not None:
                    self._curve.connect(socket)
                socket.ipv6 = "[" in self._address
                socket.connect(self._address)
                self._send_hello(index)
            self._await_welcome(timeout_s)
        except BaseException:
            self.close(linger_ms=0)
            raise
        # Only now: a socket with two peers would deal its hello to either.
        self._wake = Wake(self._receiver)
        with self._watch.lock:
            self._welcomed = True
            if self._dropped:
                self._cause = f"{self._server}: the connection closed"
        self._after()

    def receive(self) -> list[In]:
        """All that has arrived. Never blocks.

        Raises:
            WireError: a malformed frame, a gap, a repeat, or an epoch that has not begun.
        """
        messages: list[In] = []
        while True:
            with self._watch.lock:
                cause = self._cause  # read first: what arrived before the loss is still given out
            self._drain(messages)
            with self._watch.lock:
                # The wake for a loss since then may have been drained just now.
                if cause is self._cause:
                    break
        self._send_ack()
        if cause is not None and self.lost is None:
            self.lost = cause
            if self._wake is not None:
                self._wake.wake()  # the owner may look at ``lost`` only after its next poll
        return messages

    def send(self, message: Out) -> None:
        """Queue ``message``. Any thread; never blocks. After a loss it goes nowhere."""
        assert self._started, "send before start"
        with self._send_lock:
            if self._sender.closed:
                logger.debug("dropped a message to %s: the link is closed", self._server)
                return
            self._send(message)

    def _send_ack(self) -> None:
        taken, told = self._received, self._acked
        due = (
            taken.frames - told.frames >= ACK_EVERY_FRAMES
            or taken.size - told.size >= ACK_EVERY_BYTES
        )
        if not (due and self._sends_acks):
            return
        with self._send_lock:
            if not self._sender.closed:
                self._send(taken)
                self._acked = taken

    def _send(self, message: Out | Heartbeat | Ack) -> None:
        data = encode(self._sent + 1, self.epoch, message)
        self._sent += 1  # only now: a message that cannot be encoded must leave no gap
        for frame in (data,) if self._tamper is None else self._tamper(data):
            self._sender.send(frame, zmq.NOBLOCK)

    def _follow_tail(self) -> None:
        """On the watch's thread, at each tick."""
        with self._send_lock:
            if self._tail.is_alone(self._sent) and not self._sender.closed:
                self._send(Heartbeat())
                self._tail.confirmed = self._sent

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close both connections; idempotent.

        What was sent may still leave for ``linger_ms``, unless the server is lost.
        """
        if not self._started or self._receiver.closed:
            return
        self._watch.close()
        if self._wake is not None:
            self._wake.close()
        with self._send_lock:
            self._sender.close(linger=linger_ms if self._cause is None else 0)
        self._receiver.close(linger=0)

    # ------------------------------------------------------------------ start-up

    def _send_hello(self, index: int) -> None:
        hello = msgspec.structs.replace(self._hello, link=_LINKS[index])
        socket = self._receiver if index == 0 else self._sender
        socket.send(encode(0, 0, hello), zmq.NOBLOCK)

    def _await_welcome(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._receiver, zmq.POLLIN)
        poller.register(self._sender, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(min(int(left_s * 1000) + 1, HELLO_AGAIN_MS)):
                if self._take_answer(socket):
                    return
            with self._watch.lock:
                dropped, self._dropped = self._dropped, set()
            for index in sorted(dropped):
                self._send_hello(index)
        raise WireError(f"{self._server} did not answer within {timeout_s:g} s{self._hint()}")

    def _take_answer(self, socket: zmq.Socket[bytes]) -> bool:
        data = socket.recv(zmq.NOBLOCK)
        if data == WAKE:
            return False
        frame = self._codec.decode(data, self._server)
        if isinstance(frame.body, Refused):
            raise WireError(f"{self._server} turned this process away: {frame.body.cause}")
        if socket is not self._receiver or not isinstance(frame.body, Welcome):
            raise WireError(f"{self._server} did not answer the hello with a welcome")
        self.epoch = frame.body.epoch
        self._numbers = StreamNumbers(self._server, self.epoch)
        self._numbers.accept(frame)
        return True

    def _hint(self) -> str:
        with self._watch.lock:
            refusals, up = self._refusals, all(self._up)
        if refusals and not up:
            return (
                f" and broke off {refusals} handshakes: "
                "set MSTAR_TP_SECRET to the same value on every machine"
            )
        if up:
            return ": it waits for the other ranks"
        return ": check that it runs and that this machine reaches its address"

    # ------------------------------------------------------------------ losses (watch's thread)

    def _handle(self, event: ConnectionEvent) -> None:
        if event.kind == "refused":
            self._refusals += 1
        elif event.kind == "up":
            self._up[event.socket_no] = True
        elif self._up[event.socket_no]:
            self._up[event.socket_no] = False
            self._dropped.add(event.socket_no)
            if self._welcomed and self._cause is None:
                self._cause = f"{self._server}: the connection closed or went silent"

    def _after(self) -> None:
        with self._watch.lock:
            cause, told = self._cause, self._notified
            self._notified = cause is not None
        if cause is None or told:
            return
        if self._wake is not None:
            self._wake.wake()
        if self._on_lost is not None:
            self._on_lost(cause)

    def _drain(self, messages: list[In]) -> None:
        while (data := self._next_frame()) is not None:
            for one in (data,) if self._arrivals is None else self._arrivals(data):
                self._take(one, messages)

    def _take(self, data: bytes, messages: list[In]) -> None:
        frame = self._codec.decode(data, self._server)
        if not self._numbers.accept(frame):
            logger.debug("dropped a frame of dead epoch %d", frame.epoch)
            return
        if isinstance(frame.body, Refused):
            raise WireError(f"{self._server} turned this process away: {frame.body.cause}")
        if isinstance(frame.body, Welcome):
            raise WireError(f"{self._server} sent a second welcome")
        size = self._received.size + len(data)
        self._received = Ack(frames=self._received.frames + 1, size=size)
        if not isinstance(frame.body, Heartbeat):
            messages.append(frame.body)

    def _next_frame(self) -> bytes | None:
        try:
            while (parts := self._receiver.recv_multipart(zmq.NOBLOCK)) == [WAKE]:
                pass
        except zmq.Again:
            return None
        if len(parts) != 1:
            raise WireError(f"{self._server} sent a message of {len(parts)} parts, wanted 1")
        return parts[0]
