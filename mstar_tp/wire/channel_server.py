"""The listening end of a channel: the frontend towards its ranks, the leader towards its followers.

One ROUTER socket, read and written by its owner's thread alone. Every peer opens two connections
and says hello on each; it is welcomed when both hellos have passed. Whoever else connects is told
why not, and nothing it sends is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import zmq

from mstar_tp.common.errors import WireError
from mstar_tp.wire.address import Bind
from mstar_tp.wire.codec import Codec, Frame, StreamNumbers, Tamper, encode
from mstar_tp.wire.handshake import Ack, Heartbeat, Hello, Refused, Welcome
from mstar_tp.wire.sockets import (
    WAKE,
    ConnectionTable,
    ConnectionWatch,
    Tail,
    Wake,
    has_arrivals,
    open_socket,
)

logger = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")


class Lost(NamedTuple):
    """A peer is gone, or broke the protocol; what it had sent before has been given out."""

    cause: str


class _Connection(NamedTuple):
    rank: int
    link: str


class Server(Generic[In, Out]):
    """One channel's listening end for the peers ``ranks``. Owner's thread only, but for the watch.

    ``strict``: a malformed frame from a peer raises; otherwise it is logged and dropped, and a peer
    that breaks the numbering is reported as lost. ``on_lost`` is called on the watch's thread when
    a welcomed peer's connection closes. ``tamper`` is a test's.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind: Bind,
        expected: Hello,
        ranks: range,
        *,
        codec: Codec[In | Hello | Heartbeat | Ack],
        strict: bool,
        epoch: int = 0,
        on_lost: Callable[[str], None] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        """``expected``: what every peer's hello must say, but for its rank and link.

        Where it names no group, that which says hello first is the epoch's. No I/O.
        """
        self._context = context
        self._bind = bind
        self._expected = expected
        self._ranks = ranks
        self._codec = codec
        self._strict = strict
        self._on_lost = on_lost
        self._tamper = tamper
        self._started = False
        self.epoch = epoch
        self._ended: set[str] = set()
        """Groups of epochs before."""
        self._early: dict[bytes, Hello] = {}
        """Peers of groups that came while another was here, as they came."""
        self._reset()
        # Guarded by the watch's lock:
        self._descriptors = ConnectionTable()

    def _reset(self) -> None:
        self._sent = self._sent_bytes = 0
        self._acked: dict[int, Ack] = {}
        """rank -> what it has taken of that, when it last said so"""
        self._tail = Tail(confirmed=-1)  # a frame shows that the welcomes have come, too
        self._pulse_due = False
        self._group = self._expected.group or None
        self._connections: dict[bytes, _Connection] = {}
        self._ids: dict[_Connection, bytes] = {}
        self._welcomed: dict[int, bytes] = {}
        self._numbers: dict[int, StreamNumbers] = {}
        self._complete = False
        self._greeted = False
        """Whether any peer of this epoch was welcomed: its owner hears of its loss."""

    def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.socket = open_socket(self._context, zmq.ROUTER)
        self.socket.router_mandatory = True
        self._watch = ConnectionWatch(
            [self.socket],
            name="server",
            handle=self._descriptors.handle,
            after=self._after,
            tick=self._look_at_tail,
        )
        self._wake = Wake(self.socket)
        self._started = True
        try:
            self.address = self._bind.open(self.socket)
        except BaseException:
            self.close()
            raise

    def close(self, linger_ms: int = 2000) -> None:
        """Stop listening and remove the address. Idempotent."""
        if not self._started or self.socket.closed:
            return
        self._watch.close()
        self._wake.close()
        self.socket.close(linger=linger_ms)
        self._bind.close()

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected, in order."""
        return [rank for rank in self._ranks if rank not in self._welcomed]

    def backlog(self) -> tuple[int, int]:
        """Frames and bytes sent that some peer is not known to have taken."""
        frames = min((taken.frames for taken in self._acked.values()), default=0)
        size = min((taken.size for taken in self._acked.values()), default=0)
        return self._sent - frames, self._sent_bytes - size

    def wake(self) -> None:
        """Make the owner's poll return. Any thread."""
        self._wake.wake()

    def begin_epoch(self) -> None:
        """Forget every peer.

        The next epoch is that of the group which comes next, or came first of those that are here
        early.
        """
        self.epoch += 1
        self._next_group()

    def _next_group(self) -> None:
        if self._group is not None:
            self._ended.add(self._group)
        early, self._early = self._early, {}
        self._reset()
        for peer, hello in early.items():
            if not self._refuse(peer, hello):
                self._assign(peer, hello)

    def _skip_group(self) -> None:
        """A group may be gone again before any of it was welcomed: nobody heard of it."""
        if self._early and not self._connections and not self._greeted:
            self._next_group()

    def send_all(self, message: Out) -> None:
        """Send one numbered message, the same to every connected peer. Never blocks.

        Only once every peer has connected: who came later would miss the first messages.
        """
        assert self._complete, f"messages before the hello of {self.missing}"
        self._send_numbered(message)

    def _send_numbered(self, message: Out | Heartbeat) -> None:
        data = encode(self._sent + 1, self.epoch, message)
        self._sent += 1  # only now: a message that cannot be encoded must leave no gap
        self._sent_bytes += len(data)
        for frame in (data,) if self._tamper is None else self._tamper(data):
            for peer in self._welcomed.values():
                self._send(peer, frame)

    def receive(self) -> list[tuple[int, In | Lost]]:
        """All that has arrived from peers, each with its rank; a loss comes after its last message.

        Raises:
            WireError: if strict, what a peer sent is malformed or out of order.
        """
        items: list[tuple[int, In | Lost]] = []
        if self._pulse_due:
            self._pulse_due = False
            self._send_numbered(Heartbeat())
            self._tail.confirmed = self._sent
        while True:
            with self._watch.lock:
                closed = self._descriptors.take_closed()
            self._drain(items)
            for peer in closed:
                self._drop(peer, items)
            with self._watch.lock:
                # The wake for a connection that closed meanwhile may have been drained just now.
                if not self._descriptors.closed:
                    return items

    # ------------------------------------------------------------------ frames

    def _drain(self, items: list[tuple[int, In | Lost]]) -> None:
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = parts[0].bytes
            connection = self._connections.get(peer)
            if len(parts) != 2 or connection is None:
                self._take_stranger(peer, parts[1:])
                continue
            try:
                self._take_frame(connection, peer, parts[1], items)
            except WireError as error:
                if self._strict:
                    raise
                logger.error("%s", error)

    def _take_frame(
        self,
        connection: _Connection,
        peer: bytes,
        part: zmq.Frame,
        items: list[tuple[int, In | Lost]],
    ) -> None:
        frame = self._codec.decode(part.buffer, _name(connection.rank))
        if isinstance(frame.body, Hello):
            if frame.n != 0 or connection.rank in self._welcomed:
                raise WireError(f"{_name(connection.rank)} said hello twice")
            return
        numbers = self._numbers.get(connection.rank)
        if numbers is None or connection.link != "send":
            raise WireError(f"{_name(connection.rank)} spoke before it was welcomed")
        try:
            if not numbers.accept(frame):
                logger.debug("dropped a frame of dead epoch %d", frame.epoch)
                return
        except WireError as error:
            if self._strict:
                raise
            self._forget(connection.rank)
            items.append((connection.rank, Lost(str(error))))
            return
        if isinstance(frame.body, Ack):
            self._acked[connection.rank] = frame.body
        elif not isinstance(frame.body, Heartbeat):
            items.append((connection.rank, frame.body))

    def _take_stranger(self, peer: bytes, parts: list[zmq.Frame]) -> None:
        if len(parts) == 1 and parts[0].bytes == WAKE:
            return
        try:
            if len(parts) != 1:
                raise WireError(f"a stranger sent a message of {len(parts)} parts")
            frame: Frame[In | Hello | Heartbeat | Ack] = self._codec.decode(
                parts[0].buffer, "a stranger"
            )
        except WireError as error:
            logger.warning("dropped: %s", error)
            return
        if isinstance(frame.body, Hello):
            hello = frame.body
            if self._refuse(peer, hello):
                return
            if not self._track(peer, parts[0].get(zmq.SRCFD)):
                logger.debug("%s %d said hello and was gone", hello.role, hello.rank)
                return
            self._assign(peer, hello)
            self._skip_group()
        elif frame.epoch < self.epoch:
            logger.debug("dropped a frame of dead epoch %d", frame.epoch)
        else:
            logger.warning("dropped a %s from a stranger", type(frame.body).__name__)

    # ------------------------------------------------------------------ hellos

    def _assign(self, peer: bytes, hello: Hello) -> None:
        self._group = self._group or hello.group
        if hello.group != self._group:
            self._early[peer] = hello
            return
        connection = _Connection(hello.rank, hello.link)
        self._connections[peer] = connection
        self._ids[connection] = peer
        receiver = self._ids.get(_Connection(hello.rank, "receive"))
        if receiver is not None and _Connection(hello.rank, "send") in self._ids:
            self._numbers[hello.rank] = StreamNumbers(_name(hello.rank), self.epoch, first=1)
            self._welcomed[hello.rank] = receiver
            self._acked[hello.rank] = Ack(frames=0, size=0)
            self._greeted = True
            self._send(receiver, encode(0, self.epoch, Welcome(epoch=self.epoch)))
            self._complete = not self.missing

    def _refuse(self, peer: bytes, hello: Hello) -> bool:
        cause = self._objection(hello)
        if cause is None:
            return False
        logger.warning("turned away %s %d: %s", hello.role, hello.rank, cause)
        self._send(peer, encode(0, 0, Refused(cause=cause)))
        return True

    def _objection(self, hello: Hello) -> str | None:
        wanted = self._expected
        if hello.role != wanted.role:
            return f"it is a {hello.role}, wanted a {wanted.role}"
        for field in ("instance_id", "version", "world_size", "config_digest"):
            got, want = getattr(hello, field), getattr(wanted, field)
            if got != want:
                return f"its {field} is {got}, wanted {want}"
        if hello.rank not in self._ranks:
            first, last = self._ranks.start, self._ranks.stop - 1
            return f"its rank is {hello.rank}, wanted {first} to {last}"
        if wanted.group and hello.group != wanted.group:
            return f"its group is {hello.group}, wanted {wanted.group}"
        if hello.group in self._ended:
            return f"its group {hello.group} has ended: start it again"
        if hello.group == self._group:
            if _Connection(hello.rank, hello.link) in self._ids:
                return f"rank {hello.rank} is connected already"
            if self._complete:
                return f"rank {hello.rank} was lost, and its group with it"
        return None

    # ------------------------------------------------------------------ watch's thread

    def _look_at_tail(self) -> None:
        """At each tick. What it reads may change under it: a frame too many says nothing."""
        if self._complete and self._tail.is_alone(self._sent):
            self._pulse_due = True
            self._wake.wake()

    # ------------------------------------------------------------------ losses

    def _track(self, peer: bytes, fd: int) -> bool:
        """Have ``peer`` reported when its connection ``fd`` closes; False if it has closed already.

        A descriptor is used again as soon as it is closed, and hellos are not read in the order in
        which they came: the one read now may be of the connection that had ``fd`` before.
        """
        with self._watch.lock:
            self._watch.settle()
            has_arrivals(self.socket)  # the socket takes note of connections that have ended
            if not self._descriptors.is_accepted(fd) or not self._send(peer, WAKE):
                return False
            self._descriptors.track(peer, fd)
        return True

    def _after(self) -> None:
        with self._watch.lock:
            closed = bool(self._descriptors.closed)
            # Read only: a peer that is being welcomed just now is told of by its next event.
            names = [self._connections.get(peer) for peer in self._descriptors.closed]
        if closed:
            self._wake.wake()
        if self._on_lost is None or not self._complete:
            return
        for connection in names:
            if connection is not None:
                self._on_lost(f"{_name(connection.rank)}: the connection closed")

    def _drop(self, peer: bytes, items: list[tuple[int, In | Lost]]) -> None:
        self._early.pop(peer, None)
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        del self._ids[connection]
        if connection.rank in self._welcomed:
            self._forget(connection.rank)
            cause = f"{_name(connection.rank)}: the connection closed or went silent"
            items.append((connection.rank, Lost(cause)))
        self._skip_group()

    def _forget(self, rank: int) -> None:
        self._welcomed.pop(rank, None)
        self._numbers.pop(rank, None)
        self._acked.pop(rank, None)
        for link in ("receive", "send"):
            peer = self._ids.pop(_Connection(rank, link), None)
            if peer is not None:
                self._connections.pop(peer, None)

    def _send(self, peer: bytes, data: bytes) -> bool:
        """Return whether ``peer`` can still be reached."""
        try:
            self.socket.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.debug("a peer is gone: the watch reports it")
            return False
        return True


def _name(rank: int) -> str:
    return f"rank {rank}"
