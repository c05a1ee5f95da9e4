"""The ends of the two channels, by what they are for.

* Conductor channel: ``FrontendLink`` (the frontend's asyncio loop) and a ``ConductorLink`` a rank.
* Schedule channel: ``ScheduleServer`` (the leader) and a ``ScheduleClient`` a follower.

Every ``send`` numbers its message and returns at once; every ``receive`` gives what has arrived, in
order, checked. See ``wire.client`` and ``wire.channel_server`` for threads and failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from mstar_tp.common.errors import WireError
from mstar_tp.wire.address import Bind
from mstar_tp.wire.channel_server import Lost, Server
from mstar_tp.wire.client import Client
from mstar_tp.wire.codec import Codec, Tamper
from mstar_tp.wire.commands import ConductorMessage
from mstar_tp.wire.curve import Curve
from mstar_tp.wire.frontend_link import FrontendLink
from mstar_tp.wire.handshake import Ack, Heartbeat, Hello, Refused, Welcome
from mstar_tp.wire.reports import FollowerReport, RankReport
from mstar_tp.wire.schedule import ScheduleEntry

__all__ = [
    "Bind",
    "ConductorLink",
    "FrontendLink",
    "Lost",
    "ScheduleClient",
    "ScheduleServer",
]

Context = zmq.Context[zmq.Socket[bytes]]


class ConductorLink(Client[ConductorMessage, RankReport]):
    """A rank's end of the conductor channel: bodies in, reports out."""

    def __init__(
        self,
        context: Context,
        address: str,
        hello: Hello,
        curve: Curve | None = None,
        *,
        on_lost: Callable[[str], None] | None = None,
        tamper: Tamper | None = None,
        arrivals: Tamper | None = None,
    ) -> None:
        codec: Codec[ConductorMessage | Welcome | Refused | Heartbeat] = Codec(
            ConductorMessage, Welcome, Refused, Heartbeat
        )
        super().__init__(
            context,
            address,
            hello,
            server="the frontend",
            codec=codec,
            curve=curve,
            on_lost=on_lost,
            tamper=tamper,
            arrivals=arrivals,
            sends_acks=True,
        )


class ScheduleClient(Client[ScheduleEntry, FollowerReport]):
    """A follower's end of the schedule channel: entries in, copy reports out."""

    def __init__(
        self,
        context: Context,
        address: str,
        hello: Hello,
        curve: Curve | None = None,
        *,
        on_lost: Callable[[str], None] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        codec: Codec[ScheduleEntry | Welcome | Refused | Heartbeat] = Codec(
            ScheduleEntry, Welcome, Refused, Heartbeat
        )
        super().__init__(
            context,
            address,
            hello,
            server="the leader",
            codec=codec,
            curve=curve,
            on_lost=on_lost,
            tamper=tamper,
        )


class ScheduleServer:
    """The leader's end of the schedule channel. Owner's thread only: the leader's main thread."""

    def __init__(
        self,
        context: Context,
        bind: Bind,
        hello: Hello,
        *,
        epoch: int = 0,
        on_lost: Callable[[str], None] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        """``hello``: what every follower's must say, but for its rank.

        ``on_lost`` is called on another thread when a follower's connection closes. No I/O before
        ``open``.
        """
        codec: Codec[FollowerReport | Hello | Heartbeat | Ack] = Codec(
            FollowerReport, Hello, Heartbeat
        )
        self._server: Server[FollowerReport, ScheduleEntry] = Server(
            context,
            bind,
            hello,
            range(1, hello.world_size),
            codec=codec,
            strict=True,
            epoch=epoch,
            on_lost=on_lost,
            tamper=tamper,
        )
        self.lost: str | None = None
        """Which follower is gone, and why; set by ``receive``."""
        self._told = False
        self._early: list[tuple[int, FollowerReport]] = []

    def open(self) -> None:
        """Listen, so that followers can be told ``address``.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._server.open()

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def poll_socket(self) -> zmq.Socket[bytes]:
        """Readable when ``receive`` has something to say, a loss included."""
        return self._server.socket

    def start(self, timeout_s: float) -> None:
        """Wait until every follower has said hello.

        Raises:
            WireError: some did not within ``timeout_s`` (named), or one was lost meanwhile.
        """
        poller = zmq.Poller()
        poller.register(self.poll_socket, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        early: list[tuple[int, FollowerReport]] = []
        while self._server.missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WireError(
                    f"the leader waited {timeout_s:g} s at {self.address} for the hello of "
                    f"{_ranks(self._server.missing)}: look for their errors above"
                )
            poller.poll(int(left_s * 1000) + 1)
            early.extend(self._receive())
            if self.lost is not None:
                raise WireError(f"a follower was lost while the others started: {self.lost}")
        self._early = early
        self._server.wake()

    def broadcast(self, entry: ScheduleEntry) -> None:
        """Send ``entry`` to every follower. Never blocks."""
        self._server.send_all(entry)

    def receive(self) -> list[tuple[int, FollowerReport]]:
        """All reports that have arrived, each with its follower's rank. Never blocks.

        Raises:
            WireError: a follower's frame is malformed or out of order.
        """
        early, self._early = self._early, []
        return early + self._receive()

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._server.close()

    def _receive(self) -> list[tuple[int, FollowerReport]]:
        reports: list[tuple[int, FollowerReport]] = []
        for rank, item in self._server.receive():
            if isinstance(item, Lost):
                self.lost = self.lost or item.cause
            else:
                reports.append((rank, item))
        if self.lost is not None and not self._told:
            self._told = True
            self._server.wake()  # the owner may look at ``lost`` only after its next poll
        return reports


def _ranks(ranks: list[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
