"""Pins the numbering: every frame arrives once and in order, or the receiver says who broke it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import zmq
from support.channels_kit import RawPeer, frontend, hello, in_time, poll_until, zmq_context

from mstar_tp.common.errors import WireError
from mstar_tp.wire import sockets
from mstar_tp.wire.channels import Bind, ConductorLink, Lost, ScheduleClient, ScheduleServer
from mstar_tp.wire.codec import Tamper, encode
from mstar_tp.wire.commands import Abort
from mstar_tp.wire.handshake import Welcome
from mstar_tp.wire.reports import CopyIn, Progress
from mstar_tp.wire.schedule import Advance
from mstar_tp.wire.values import AdapterKey

REPORT = CopyIn(rank=1, key=AdapterKey("a", 0), fetch_no=1, digest="d", cause=None)

BREACHES = [
    ([(2, 0)], "sent frame 2, wanted frame 1 of epoch 0: frames were lost"),
    ([(1, 0), (1, 0)], "sent frame 1, wanted frame 2 of epoch 0: a frame was repeated"),
    ([(1, 3)], "sent a frame of epoch 3, wanted epoch 0"),
]


def lost_once(message: str) -> Tamper:
    """Of a stream's frames, the first that carries ``message`` is lost."""
    done: list[bytes] = []

    def tamper(data: bytes) -> list[bytes]:
        if message.encode() in data and not done:
            done.append(data)
            return []
        return [data]

    return tamper


@pytest.mark.parametrize("stream", ["schedule", "copies"])
def test_a_last_frame_that_is_lost_between_ranks_is_noticed_though_none_follows(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PULSE_AFTER_S", 0.05)
    with zmq_context() as context:
        lost = {"tamper": lost_once("Advance" if stream == "schedule" else "CopyIn")}
        server = ScheduleServer(
            context, Bind("ipc"), hello(), **(lost if stream == "schedule" else {})
        )
        server.open()
        client = ScheduleClient(
            context, server.address, hello(1), **(lost if stream == "copies" else {})
        )
        starting = threading.Thread(target=client.start, args=(120,))
        starting.start()
        server.start(120)
        starting.join()
        ends = [client.poll_socket, server.poll_socket]
        poller = zmq.Poller()
        for end in ends:
            poller.register(end, zmq.POLLIN)

        def serve() -> None:
            while True:
                poller.poll()
                assert client.receive() == server.receive() == []

        server.broadcast(Advance(ingested=1)) if stream == "schedule" else client.send(REPORT)
        with pytest.raises(WireError, match="frames were lost"):
            serve()
        client.close()
        server.close()


@pytest.mark.parametrize("stream", ["commands", "reports"])
def test_a_last_frame_that_is_lost_to_or_from_the_frontend_is_noticed_though_none_follows(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PULSE_AFTER_S", 0.05)

    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            lost = (
                {"arrivals": lost_once("Abort")}
                if stream == "commands"
                else {"tamper": lost_once("Progress")}
            )
            end = ConductorLink(context, link.address, hello(world_size=1), **lost)
            await asyncio.to_thread(end.start, 120)
            await in_time(link.wait_connected(120))
            if stream == "reports":
                end.send(Progress(rank=0, text="lost"))
                _, item = await in_time(link.receive())
                assert isinstance(item, Lost) and "frames were lost" in item.cause
            else:
                link.send_all(Abort(rid=1))
                with pytest.raises(WireError, match="frames were lost"):
                    await asyncio.to_thread(poll_until, end.poll_socket, end.receive)
            end.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_stream_that_is_silent_is_followed_up_once() -> None:
    tail = sockets.Tail()
    assert not any(tail.is_alone(0) for _ in range(3)), "nothing was sent"
    assert not tail.is_alone(2), "it is not silent"
    assert tail.is_alone(2)
    tail.confirmed = 3
    assert not any(tail.is_alone(3) for _ in range(3))
    assert not tail.is_alone(4) and tail.is_alone(4)


class RawLeader:
    """A leader that numbers its frames as a test likes."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.last_endpoint.decode()

    def welcome(self, client: ScheduleClient) -> bytes:
        """Start ``client``; the id of the connection it receives on."""
        starting = threading.Thread(target=client.start, args=(120,))
        starting.start()
        while True:
            peer, data = self.socket.recv_multipart()
            if b"receive" in data:
                break
        self.socket.send_multipart([peer, encode(0, 0, Welcome(epoch=0))])
        starting.join()
        return peer


@pytest.mark.parametrize(("frames", "message"), BREACHES)
def test_a_follower_stops_at_a_breach_of_the_leaders_numbers(frames, message) -> None:
    with zmq_context() as context:
        leader = RawLeader(context)
        client = ScheduleClient(context, leader.address, hello(1))
        peer = leader.welcome(client)
        for n, epoch in frames:
            leader.socket.send_multipart([peer, encode(n, epoch, Advance(ingested=1))])
        with pytest.raises(WireError, match=f"the leader at {leader.address} {message}"):
            poll_until(client.poll_socket, lambda: client.receive() and None)
        client.close()
        leader.socket.close()


@pytest.mark.parametrize("parts", [[b"garbage"], [b"\x93\x01\x00\xc0"], [b"a", b"b"]])
def test_a_malformed_frame_of_the_leader_is_fatal(parts) -> None:
    with zmq_context() as context:
        leader = RawLeader(context)
        client = ScheduleClient(context, leader.address, hello(1))
        peer = leader.welcome(client)
        leader.socket.send_multipart([peer, *parts])
        with pytest.raises(WireError, match="the leader at"):
            poll_until(client.poll_socket, client.receive)
        client.close()
        leader.socket.close()


def start_raw_follower(context: zmq.Context) -> tuple[ScheduleServer, RawPeer]:
    server = ScheduleServer(context, Bind("ipc"), hello())
    server.open()
    peer = RawPeer(context, server.address, 1)
    peer.say_hello()
    server.start(120)
    return server, peer


@pytest.mark.parametrize(("frames", "message"), BREACHES)
def test_the_leader_stops_at_a_breach_of_a_followers_numbers(frames, message) -> None:
    with zmq_context() as context:
        server, peer = start_raw_follower(context)
        for n, epoch in frames:
            peer.send(n, REPORT, epoch)
        with pytest.raises(WireError, match=f"rank 1 {message}"):
            poll_until(server.poll_socket, lambda: server.receive() and None)
        peer.close()
        server.close()


def test_a_malformed_frame_of_a_follower_is_fatal() -> None:
    with zmq_context() as context:
        server, peer = start_raw_follower(context)
        peer.sender.send(b"garbage")
        with pytest.raises(WireError, match="rank 1 sent a malformed frame"):
            poll_until(server.poll_socket, server.receive)
        peer.close()
        server.close()


@pytest.mark.parametrize(("frames", "message"), BREACHES)
def test_a_rank_that_breaks_its_numbers_is_lost_to_the_frontend_which_lives_on(
    frames, message
) -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            peers = [RawPeer(context, link.address, rank) for rank in range(2)]
            for peer in peers:
                peer.say_hello()
            await in_time(link.wait_connected(120))
            for n, epoch in frames:
                peers[1].send(n, Progress(rank=1, text="x"), epoch)
            items = [await in_time(link.receive()) for _ in frames]
            assert items[-1] == (1, Lost(f"rank 1 {message}"))
            peers[0].send(1, Progress(rank=0, text="still here"))
            assert await in_time(link.receive()) == (0, Progress(rank=0, text="still here"))
            for peer in peers:
                peer.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_the_frontend_drops_what_is_malformed_or_from_a_stranger_and_says_so(caplog) -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            stranger = RawPeer(context, link.address, 0, world_size=1)
            stranger.sender.send(b"\x80\x04garbage")
            stranger.sender.send_multipart([b"more", b"parts"])
            stranger.sender.send(b"")
            stranger.send(1, Progress(rank=0, text="no hello"))
            end = ConductorLink(context, link.address, hello(world_size=1))
            await asyncio.to_thread(end.start, 120)
            rude = end._sender
            rude.send(b"garbage from a rank")
            end.send(Progress(rank=0, text="fine"))
            assert await in_time(link.receive()) == (0, Progress(rank=0, text="fine"))
            while "no hello" not in "".join(seen) and "from a stranger" not in caplog.text:
                end.send(Progress(rank=0, text="ping"))
                seen.append(repr(await in_time(link.receive())))
            stranger.close()
            end.close()

    seen: list[str] = []
    with zmq_context() as context:
        asyncio.run(main(context))
    assert "a stranger sent a malformed frame" in caplog.text
    assert "a stranger sent a message of 2 parts" in caplog.text
    assert "dropped a Progress from a stranger" in caplog.text
    assert "rank 0 sent a malformed frame of 19 bytes" in caplog.text


def test_sends_from_many_threads_at_once_leave_no_gap() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            end = ConductorLink(context, link.address, hello(world_size=1))
            await asyncio.to_thread(end.start, 120)

            def chatter(number: int) -> None:
                for _ in range(200):
                    end.send(Progress(rank=0, text=str(number)))

            threads = [threading.Thread(target=chatter, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            items = [await in_time(link.receive()) for _ in range(800)]
            for thread in threads:
                thread.join()
            texts = [item.text for _, item in items]  # type: ignore[union-attr]
            assert sorted(texts) == sorted(str(number) for number in range(4) for _ in range(200))
            end.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_messages_for_the_ranks_may_be_sent_from_another_thread_than_the_loops() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            end = ConductorLink(context, link.address, hello(world_size=1))
            await asyncio.to_thread(end.start, 120)
            await in_time(link.wait_connected(120))
            await asyncio.to_thread(lambda: [link.send_all(Abort(rid=n)) for n in range(50)])
            got: list = []
            await asyncio.to_thread(
                poll_until, end.poll_socket, lambda: got.extend(end.receive()) or len(got) >= 50
            )
            assert got == [Abort(rid=n) for n in range(50)]
            end.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_message_that_cannot_be_encoded_leaves_no_gap() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            end = ConductorLink(context, link.address, hello(world_size=1))
            await asyncio.to_thread(end.start, 120)
            with pytest.raises(OverflowError):
                end.send(Progress(rank=2**70, text="x"))
            end.send(Progress(rank=0, text="after"))
            assert await in_time(link.receive()) == (0, Progress(rank=0, text="after"))
            end.close()

    with zmq_context() as context:
        asyncio.run(main(context))
