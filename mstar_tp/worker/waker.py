"""Wakes a main thread that polls sockets, from any thread."""

from __future__ import annotations

import socket
from typing import Any, Protocol

import zmq


class Poller(Protocol):
    """Waits for sockets."""

    def poll(self, timeout: int | None = None) -> list[Any]:
        """Block until one is readable (or ``timeout`` ms have passed); those that are."""
        ...


class Waker:
    """A socket pair: ``wake`` makes ``fileno`` readable until ``clear``.

    Never blocks; wakes may coalesce.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def poller(self, *sockets: zmq.Socket[bytes]) -> Poller:
        """Waits until one of ``sockets`` is readable, or for a wake."""
        poller = zmq.Poller()
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        poller.register(self.fileno(), zmq.POLLIN)
        return poller

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except BlockingIOError:
            # The pipe is full of wakes that nobody has cleared yet: one more says nothing new.
            return

    def clear(self) -> None:
        try:
            # What is left of more wakes than this makes the next poll return at once.
            self._read.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._read.close()
        self._write.close()
