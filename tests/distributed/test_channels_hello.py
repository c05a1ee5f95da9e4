"""Pins the start of every channel: all say hello before the first message; strangers are told
why they are turned away.
"""

from __future__ import annotations

import asyncio
import socket as net
import threading
from contextlib import suppress
from functools import partial

import pytest
import zmq
from support.channels_kit import (
    RawPeer,
    frontend,
    hello,
    in_time,
    poll_until,
    receive_number,
    zmq_context,
)

from mstar_tp.common.errors import WireError
from mstar_tp.wire.channel_server import Server
from mstar_tp.wire.channels import (
    Bind,
    ConductorLink,
    FrontendLink,
    Lost,
    ScheduleClient,
    ScheduleServer,
)
from mstar_tp.wire.commands import Abort
from mstar_tp.wire.curve import curve_from_secret
from mstar_tp.wire.handshake import Refused
from mstar_tp.wire.reports import CopyIn, Progress
from mstar_tp.wire.schedule import Advance
from mstar_tp.wire.sockets import ConnectionEvent
from mstar_tp.wire.values import AdapterKey

SECRET = "correct horse battery staple"


async def connect(context, address, rank, curve=None, **changes) -> ConductorLink:
    link = ConductorLink(context, address, hello(rank, **changes), curve)
    await asyncio.to_thread(link.start, 120)
    return link


@pytest.mark.parametrize("bind", ["ipc", "tcp://127.0.0.1"])
def test_every_rank_gets_one_and_the_same_stream_and_reports_carry_their_rank(bind: str) -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, Bind(bind)) as link:
            ranks = await asyncio.gather(*(connect(context, link.address, r) for r in range(2)))
            await in_time(link.wait_connected(120))
            for rid in range(100):
                link.send_all(Abort(rid=rid))
            for rank, end in enumerate(ranks):
                got = await asyncio.to_thread(receive_number, end, 100)
                assert got == [Abort(rid=rid) for rid in range(100)]
                end.send(Progress(rank=rank, text="done"))
                assert await in_time(link.receive()) == (rank, Progress(rank=rank, text="done"))
                assert end.lost is None
            for end in ranks:
                end.close()

    with zmq_context() as context:
        asyncio.run(main(context))


@pytest.mark.parametrize(
    ("rank", "changes", "reason"),
    [
        (2, {}, "its rank is 2, wanted 0 to 1"),
        (-1, {}, "its rank is -1, wanted 0 to 1"),
        (1, {"config_digest": "other"}, "its config_digest is other, wanted cfg"),
        (1, {"version": "0.9"}, "its version is 0.9, wanted 1.0"),
        (1, {"world_size": 4}, "its world_size is 4, wanted 2"),
        (1, {"instance_id": "else"}, "its instance_id is else, wanted inst"),
        (1, {"role": "follower"}, "it is a follower, wanted a rank"),
        (1, {"group": "ended"}, "its group ended has ended"),
        (0, {}, "rank 0 is connected already"),
    ],
)
def test_whoever_does_not_belong_is_refused_with_the_reason(rank, changes, reason) -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            (await connect(context, link.address, 0, group="ended")).close()
            link.begin_epoch()
            first = await connect(context, link.address, 0)
            with pytest.raises(WireError, match=f"turned this process away: {reason}"):
                await connect(context, link.address, rank, **changes)
            # And it took nobody's place.
            second = await connect(context, link.address, 1)
            await in_time(link.wait_connected(120))
            first.close()
            second.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_the_frontend_names_the_rank_whose_hello_did_not_come() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            first = await connect(context, link.address, 0)
            with pytest.raises(WireError, match="for the hello of rank 1"):
                await link.wait_connected(0.2)
            first.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_the_leader_names_the_followers_whose_hello_did_not_come() -> None:
    with zmq_context() as context:
        server = ScheduleServer(context, Bind("ipc"), hello(world_size=4))
        server.open()
        client = ScheduleClient(context, server.address, hello(2, world_size=4))
        starting = threading.Thread(target=client.start, args=(120,))
        starting.start()
        with pytest.raises(WireError, match="for the hello of ranks 1, 3:"):
            server.start(1.0)
        starting.join()
        client.close()
        server.close()


def test_a_rank_that_finds_no_frontend_says_where_it_looked() -> None:
    with zmq_context() as context:
        link = ConductorLink(context, "ipc:///nonexistent/wire", hello())
        with pytest.raises(
            WireError, match="the frontend at ipc:///nonexistent/wire did not answer"
        ):
            link.start(0.2)
        link.close()


def test_a_rank_waits_for_a_frontend_that_starts_later() -> None:
    with net.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def main(context: zmq.Context) -> None:
        link = ConductorLink(context, f"tcp://127.0.0.1:{port}", hello(world_size=1))
        starting = asyncio.create_task(asyncio.to_thread(link.start, 120))
        await asyncio.sleep(0.2)  # not to synchronise: whichever comes first, it must work
        with frontend(context, Bind(f"tcp://127.0.0.1:{port}"), world_size=1):
            await in_time(starting)
            link.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_hello_is_said_again_when_its_connection_breaks_before_the_welcome() -> None:
    async def main(context: zmq.Context) -> None:
        doomed = context.socket(zmq.ROUTER)
        port = doomed.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        starting = asyncio.create_task(connect(context, address, 0, world_size=1))
        for _ in range(2):
            assert b"Hello" in (await asyncio.to_thread(doomed.recv_multipart))[1]
        doomed.close(linger=0)
        with frontend(context, Bind(address), world_size=1):
            (await in_time(starting)).close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_strangers_that_come_and_go_cost_no_rank_its_place() -> None:
    """Connections reuse each other's file descriptors: a stranger's end is not a rank's."""

    def churn(context: zmq.Context, address: str) -> None:
        for _ in range(40):
            stranger = RawPeer(context, address, 7)
            stranger.say_hello()
            stranger.sender.recv()
            stranger.close()

    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            noise = asyncio.create_task(asyncio.to_thread(churn, context, link.address))
            ranks = await asyncio.gather(*(connect(context, link.address, r) for r in range(2)))
            await in_time(link.wait_connected(120))
            await in_time(noise)
            for rank, end in enumerate(ranks):
                end.send(Progress(rank=rank, text="here"))
                assert await in_time(link.receive()) == (rank, Progress(rank=rank, text="here"))
            for end in ranks:
                end.close()
            lost = [await in_time(link.receive()) for _ in ranks]
            assert sorted(rank for rank, item in lost if isinstance(item, Lost)) == [0, 1]

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_rank_is_missed_though_strangers_had_its_descriptors_before_it(monkeypatch) -> None:
    """Hellos of several connections are read in no certain order: here, the newest first."""
    receive, handle = zmq.Socket.recv_multipart, Server._handle
    held: list[list[zmq.Frame]] = []
    closed = threading.Semaphore(0)

    def newest_first(socket: zmq.Socket, *args: object, **options: object) -> object:
        if socket.type != zmq.ROUTER:
            return receive(socket, *args, **options)
        with suppress(zmq.Again):
            while True:
                held.append(receive(socket, *args, **options))
        if not held:
            raise zmq.Again
        return held.pop()

    def count_closed(server: Server, event: ConnectionEvent) -> None:
        handle(server, event)
        if event.kind == "closed":
            closed.release()

    monkeypatch.setattr(zmq.Socket, "recv_multipart", newest_first)
    monkeypatch.setattr(Server, "_handle", count_closed)
    with zmq_context() as context:
        for _ in range(12):  # which descriptors the rank gets is up to the system
            server = ScheduleServer(context, Bind("ipc"), hello())
            server.open()
            strangers = [RawPeer(context, server.address, 7) for _ in range(3)]
            for stranger in strangers:
                stranger.say_hello()
                for socket in (stranger.receiver, stranger.sender):
                    socket.linger = 5000
                    socket.close()
            for _ in range(2 * len(strangers)):
                assert closed.acquire(timeout=120)
            rank = RawPeer(context, server.address, 1)
            rank.say_hello()
            server.start(120)
            rank.close()
            poll_until(server.poll_socket, partial(_is_lost, server))
            server.close()


def _is_lost(server: ScheduleServer) -> bool:
    server.receive()
    return server.lost is not None


def test_a_report_sent_while_others_still_start_is_not_lost() -> None:
    report = CopyIn(rank=1, key=AdapterKey("a", 0), fetch_no=1, digest="d", cause=None)
    with zmq_context() as context:
        server = ScheduleServer(context, Bind("ipc"), hello(world_size=3))
        server.open()
        sent = threading.Event()
        first = ScheduleClient(context, server.address, hello(1, world_size=3))
        second = ScheduleClient(context, server.address, hello(2, world_size=3))

        def start_first() -> None:
            first.start(120)
            first.send(report)
            sent.set()

        def start_second() -> None:
            assert sent.wait(120)
            second.start(120)

        threads = [threading.Thread(target=start) for start in (start_first, start_second)]
        for thread in threads:
            thread.start()
        server.start(120)
        for thread in threads:
            thread.join()
        assert poll_until(server.poll_socket, server.receive) == [(1, report)]
        server.broadcast(Advance(ingested=3))
        for client in (first, second):
            assert poll_until(client.poll_socket, client.receive) == [Advance(ingested=3)]
            client.close()
        server.close()


def test_nobody_takes_a_lost_ranks_place_in_its_epoch_but_a_new_epoch_begins_anew() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            old = await connect(context, link.address, 0, world_size=1)
            await in_time(link.wait_connected(120))
            link.send_all(Abort(rid=1))
            old.close()
            rank, item = await in_time(link.receive())
            assert rank == 0 and isinstance(item, Lost) and "rank 0" in item.cause
            with pytest.raises(WireError, match="rank 0 was lost, and its group with it"):
                await connect(context, link.address, 0, world_size=1)

            # Ranks may be faster than the frontend: the next group's hello waits for it.
            early = asyncio.create_task(
                connect(context, link.address, 0, world_size=1, group="second")
            )
            await asyncio.sleep(0.1)  # not to synchronise: either order must work
            link.begin_epoch()
            new = await in_time(early)
            assert new.epoch == link.epoch == 1
            await in_time(link.wait_connected(120))
            link.send_all(Abort(rid=2))
            got = await asyncio.to_thread(poll_until, new.poll_socket, new.receive)
            assert got == [Abort(rid=2)]
            new.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_groups_are_taken_in_the_order_in_which_they_came_but_for_those_that_are_gone() -> None:
    """The second was gone before it was seated, the third before all of it had come."""

    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            address = link.address
            old = [await connect(context, address, rank) for rank in (0, 1)]
            early = [RawPeer(context, address, 0, group=group) for group in ("second", "third")]
            for peer in early:
                peer.say_hello()
            last = [
                asyncio.create_task(connect(context, address, rank, group="last"))
                for rank in (1, 0)
            ]
            link.send_all(Abort(rid=1))
            early[0].close()
            for client in old:
                client.close()
            assert {(await in_time(link.receive()))[0] for _ in old} == {0, 1}
            link.begin_epoch()
            early[1].close()
            while True:
                # Whether the third was welcomed before it went, its owner heard of it.
                ready = asyncio.ensure_future(link.wait_connected(120))
                heard = asyncio.ensure_future(link.receive())
                await in_time(asyncio.wait({ready, heard}, return_when=asyncio.FIRST_COMPLETED))
                if ready.done():
                    heard.cancel()
                    break
                ready.cancel()
                assert isinstance(heard.result()[1], Lost)
                link.begin_epoch()
            clients = [await in_time(task) for task in last]
            assert {client.epoch for client in clients} == {link.epoch}
            link.send_all(Abort(rid=2))
            for client in clients:
                got = await asyncio.to_thread(poll_until, client.poll_socket, client.receive)
                assert got == [Abort(rid=2)]
                client.close()
            with pytest.raises(WireError, match="its group first has ended"):
                await connect(context, address, 0)

    with zmq_context() as context:
        asyncio.run(main(context))


def test_frames_of_a_dead_epoch_are_dropped() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context, world_size=1) as link:
            ghost = RawPeer(context, link.address, 0, world_size=1)
            ghost.say_hello()
            await in_time(link.wait_connected(120))
            link.begin_epoch()
            new = await connect(context, link.address, 0, world_size=1, group="second")
            await in_time(link.wait_connected(120))
            ghost.send(1, Progress(rank=0, text="from the grave"))
            ghost.close()
            new.send(Progress(rank=0, text="alive"))
            assert await in_time(link.receive()) == (0, Progress(rank=0, text="alive"))
            new.close()

    with zmq_context() as context:
        asyncio.run(main(context))


# ---------------------------------------------------------------------------------- CURVE over TCP


def test_with_the_secret_a_rank_is_welcomed_over_tcp() -> None:
    async def main(context: zmq.Context) -> None:
        curve = curve_from_secret(SECRET)
        with frontend(context, Bind("tcp://127.0.0.1", curve), world_size=1) as link:
            end = await connect(context, link.address, 0, curve, world_size=1)
            await in_time(link.wait_connected(120))
            link.send_all(Abort(rid=7))
            got = await asyncio.to_thread(poll_until, end.poll_socket, end.receive)
            assert got == [Abort(rid=7)]
            end.close()

    with zmq_context() as context:
        asyncio.run(main(context))


@pytest.mark.parametrize("secret", [None, SECRET + "!"])
def test_without_the_right_secret_nobody_gets_in_and_the_message_names_it(secret) -> None:
    async def main(context: zmq.Context) -> None:
        bind = Bind("tcp://127.0.0.1", curve_from_secret(SECRET))
        with frontend(context, bind, world_size=1) as link:
            wrong = None if secret is None else curve_from_secret(secret)
            end = ConductorLink(context, link.address, hello(world_size=1), wrong)
            with pytest.raises(WireError, match="MSTAR_TP_SECRET"):
                await asyncio.to_thread(end.start, 1.0)
            with pytest.raises(WireError, match="hello of rank 0"):
                await link.wait_connected(0.1)

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_refusal_reaches_a_peer_that_only_says_hello_once() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link:
            stranger = RawPeer(context, link.address, 9)
            stranger.say_hello()
            parts = await asyncio.to_thread(stranger.sender.recv)
            assert Refused.__name__.encode() in parts
            stranger.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_sends_before_all_are_connected_are_a_programming_error() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link, pytest.raises(AssertionError, match=r"hello of \[0, 1\]"):
            assert isinstance(link, FrontendLink)
            link.send_all(Abort(rid=1))

    with zmq_context() as context:
        asyncio.run(main(context))
