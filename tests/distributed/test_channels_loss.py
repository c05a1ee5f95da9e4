"""Pins that a peer that is killed or stopped is noticed, by name, and a busy one is not.

Peers are processes and the signals real. Guard times are generous; the figure of "within 5 s" is a
matter of two constants, which one test adds up.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading

import pytest
import zmq
from support.channels_kit import GUARD_S, child, frontend, hello, in_time, poll_until, zmq_context

from mstar_tp.wire import sockets
from mstar_tp.wire.channels import Bind, ConductorLink, Lost, ScheduleClient, ScheduleServer
from mstar_tp.wire.commands import Abort
from mstar_tp.wire.reports import Progress
from mstar_tp.wire.schedule import Advance

RANK = """
import sys, zmq
from support.channels_kit import hello
from mstar_tp.wire.channels import ConductorLink
from mstar_tp.wire.reports import (Progress)
link = ConductorLink(zmq.Context(), sys.argv[1], hello(int(sys.argv[2])))
link.start(120)
for number in range(100):
    link.send(Progress(rank=int(sys.argv[2]), text=str(number)))
sys.stdin.read() if len(sys.argv) < 4 else exec(sys.argv[3])
"""

FOLLOWER = """
import sys, zmq
from support.channels_kit import hello
from mstar_tp.wire.channels import ScheduleClient
link = ScheduleClient(zmq.Context(), sys.argv[1], hello(int(sys.argv[2]), world_size=3))
link.start(120)
import signal
signal.pause()
"""

LEADER = """
import signal, zmq
from support.channels_kit import hello
from mstar_tp.wire.channels import Bind, ScheduleServer
from mstar_tp.wire.schedule import (Advance)
server = ScheduleServer(zmq.Context(), Bind("tcp://127.0.0.1"), hello())
server.open()
print(server.address, flush=True)
server.start(120)
for number in range(100):
    server.broadcast(Advance(ingested=number))
signal.pause()
"""

FRONTEND = """
import asyncio, signal, zmq
from support.channels_kit import hello
from mstar_tp.wire.channels import Bind, FrontendLink
from mstar_tp.wire.commands import (Abort)

async def main():
    link = FrontendLink(zmq.Context(), Bind("tcp://127.0.0.1"), hello(world_size=1))
    link.start()
    print(link.address, flush=True)
    await link.wait_connected(120)
    for number in range(100):
        link.send_all(Abort(rid=number))
    await asyncio.sleep(300)

asyncio.run(main())
"""

# Holds the interpreter's lock for longer than a silent peer is given.
BUSY = "import ctypes; ctypes.PyDLL(None).usleep(4200000); link.send(Progress(rank=1, text='back'))"


def test_silence_is_noticed_within_five_seconds() -> None:
    assert sockets.HEARTBEAT_MS + sockets.SILENCE_MS < 5000


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_frontend_hears_a_ranks_last_words_and_then_that_it_is_gone(sent) -> None:
    async def main(context: zmq.Context) -> None:
        with (
            frontend(context) as link,
            child(RANK, link.address, "1", "import signal; signal.pause()") as process,
        ):
            other = ConductorLink(context, link.address, hello(0))
            await asyncio.to_thread(other.start, 120)
            await in_time(link.wait_connected(120))
            items = [await in_time(link.receive()) for _ in range(100)]
            assert items == [(1, Progress(rank=1, text=str(number))) for number in range(100)]
            os.kill(process.pid, sent)
            rank, item = await in_time(link.receive())
            assert rank == 1
            assert isinstance(item, Lost) and item.cause.startswith("rank 1:")
            # The survivor still hears and is heard.
            link.send_all(Abort(rid=1))
            got = await asyncio.to_thread(poll_until, other.poll_socket, other.receive)
            assert got == [Abort(rid=1)]
            other.send(Progress(rank=0, text="here"))
            assert await in_time(link.receive()) == (0, Progress(rank=0, text="here"))
            other.close()

    with zmq_context() as context:
        asyncio.run(main(context))


def test_a_rank_whose_python_is_stuck_is_not_taken_for_dead() -> None:
    async def main(context: zmq.Context) -> None:
        with frontend(context) as link, child(RANK, link.address, "1", BUSY):
            other = ConductorLink(context, link.address, hello(0))
            await asyncio.to_thread(other.start, 120)
            await in_time(link.wait_connected(120))
            items = [await in_time(link.receive()) for _ in range(101)]
            assert items[-1] == (1, Progress(rank=1, text="back"))
            other.close()

    with zmq_context() as context:
        asyncio.run(main(context))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_leader_names_the_follower_that_is_gone(sent) -> None:
    with zmq_context() as context:
        server = ScheduleServer(context, Bind("ipc"), hello(world_size=3))
        server.open()
        with child(FOLLOWER, server.address, "1"), child(FOLLOWER, server.address, "2") as process:
            server.start(120)
            os.kill(process.pid, sent)
            poll_until(server.poll_socket, lambda: server.receive() or server.lost)
            assert server.lost is not None and server.lost.startswith("rank 2:")
            server.broadcast(Advance(ingested=1))  # to the survivor; never an error
        server.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_applies_the_leaders_last_entries_and_then_knows_it_is_gone(sent) -> None:
    told: list[str] = []
    with zmq_context() as context, child(LEADER) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        client = ScheduleClient(context, address, hello(1), on_lost=told.append)
        client.start(120)
        got: list[object] = []
        poll_until(client.poll_socket, lambda: got.extend(client.receive()) or len(got) >= 100)
        os.kill(process.pid, sent)
        poll_until(client.poll_socket, lambda: client.receive() or client.lost)
        assert got == [Advance(ingested=number) for number in range(100)]
        assert client.lost is not None and client.lost.startswith("the leader at")
        assert told == [client.lost]
        client.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_told_at_once_when_the_frontend_is_gone_even_while_its_main_thread_is_busy(
    sent,
) -> None:
    gone = threading.Event()
    causes: list[str] = []

    def on_lost(cause: str) -> None:
        causes.append(cause)
        gone.set()

    with zmq_context() as context, child(FRONTEND) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        link = ConductorLink(context, address, hello(world_size=1), on_lost=on_lost)
        link.start(120)
        os.kill(process.pid, sent)
        assert gone.wait(GUARD_S)
        assert causes and causes[0].startswith("the frontend at")
        assert link.lost is None  # the main thread has not looked yet
        link.send(Progress(rank=0, text="nobody hears this"))
        poll_until(link.poll_socket, lambda: (link.receive() and None) or link.lost)
        assert link.lost == causes[0]
        link.close()


def test_all_that_a_leader_sent_before_it_ended_is_applied_before_its_end_is_noticed() -> None:
    gone = threading.Event()
    with (
        zmq_context() as context,
        child(LEADER.replace("signal.pause()", "server.close()")) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        client = ScheduleClient(context, address, hello(1), on_lost=lambda cause: gone.set())
        client.start(120)
        assert gone.wait(GUARD_S)
        assert client.lost is None
        assert client.receive() == [Advance(ingested=number) for number in range(100)]
        assert client.lost is not None
        client.close()


def test_a_loss_leaves_the_poll_socket_readable_once_more() -> None:
    with zmq_context() as context:
        server = ScheduleServer(context, Bind("ipc"), hello())
        server.open()
        client = ScheduleClient(context, server.address, hello(1))
        starting = threading.Thread(target=client.start, args=(120,))
        starting.start()
        server.start(120)
        starting.join()
        server.broadcast(Advance(ingested=1))
        server.close()
        got: list[object] = []
        poll_until(client.poll_socket, lambda: got.extend(client.receive()) or client.lost)
        assert got == [Advance(ingested=1)]
        # A loop that looks at ``lost`` before it receives would otherwise sleep for ever.
        assert client.poll_socket.poll(int(GUARD_S * 1000)) == zmq.POLLIN
        client.close()


def test_this_test_can_hold_the_interpreter_lock() -> None:
    assert hasattr(ctypes.PyDLL(None), "usleep")
