"""Helpers of the channel tests: hellos, raw peers that break the rules, and peers in processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from mstar_tp.wire.channels import Bind, FrontendLink
from mstar_tp.wire.codec import encode
from mstar_tp.wire.handshake import Hello

GUARD_S = 120.0


def hello(rank: int = 0, **changes: object) -> Hello:
    fields: dict[str, object] = {
        "role": "rank",
        "rank": rank,
        "world_size": 2,
        "instance_id": "inst",
        "config_digest": "cfg",
        "version": "1.0",
        "group": "first",
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


@contextmanager
def zmq_context() -> Iterator[zmq.Context]:
    """A context whose term would hang a passing test if a link left a socket open."""
    context = zmq.Context()
    try:
        yield context
    except BaseException:
        context.destroy(linger=0)
        raise
    context.term()


@contextmanager
def frontend(context: zmq.Context, bind: Bind | None = None, **changes: object):
    """A listening FrontendLink, closed at the end. Inside a running loop."""
    link = FrontendLink(context, bind or Bind("ipc"), hello(group="", **changes))
    link.start()
    try:
        yield link
    finally:
        link.close()


class RawPeer:
    """A peer without manners: two DEALER sockets on which a test sends any bytes it likes."""

    def __init__(self, context: zmq.Context, address: str, rank: int, **changes: object) -> None:
        self.receiver = context.socket(zmq.DEALER)
        self.sender = context.socket(zmq.DEALER)
        self.rank = rank
        self.changes = changes
        for socket in (self.receiver, self.sender):
            socket.linger = 0
            socket.connect(address)

    def say_hello(self) -> None:
        for socket, link in ((self.receiver, "receive"), (self.sender, "send")):
            message = hello(self.rank, link=link, **self.changes)
            socket.send(encode(0, 0, message))

    def send(self, n: int, body: object, epoch: int = 0) -> None:
        self.sender.send(encode(n, epoch, body))

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def poll_until(socket: zmq.Socket, look: Callable[[], object]) -> object:
    """Poll ``socket`` until ``look`` finds something; fails after a guard time."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    deadline = time.monotonic() + GUARD_S
    while not (found := look()):
        left_s = deadline - time.monotonic()
        assert left_s > 0, "nothing came within the guard time"
        poller.poll(int(left_s * 1000))
    return found


def receive_number(link, number: int) -> list[object]:
    """The first ``number`` messages of ``link`` (and what came with the last of them)."""
    got: list[object] = []
    poll_until(link.poll_socket, lambda: got.extend(link.receive()) or len(got) >= number)
    return got


async def in_time(awaitable):
    return await asyncio.wait_for(awaitable, GUARD_S)


@contextmanager
def child(source: str, *arguments: str):
    """A Python process that runs ``source``; it is killed at the end. Its output goes to ours."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED=str(len(source) % 4096))
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments], env=environment, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(GUARD_S)
        if process.stdout is not None:
            process.stdout.close()
