"""The address of a server's socket: a private folder on this machine, or one interface.

``ipc``: a Unix socket in a fresh folder that only this user may enter; the folder goes at close, or
when somebody next listens here, should this process be killed.
``tcp://INTERFACE[:PORT]``: one interface, by its name or its IP address, never all of them. Beyond
loopback a shared secret (see ``wire.curve``) is required.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import zmq

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.run_folder import RunFolder, sweep
from mstar_tp.wire.curve import Curve

MAX_SOCKET_PATH = 107
"""Bytes in a Unix socket's path, without its closing zero (Linux)."""


class Bind:
    """A place to listen, checked when built; ``open`` binds a socket, ``close`` removes it."""

    def __init__(self, text: str, curve: Curve | None = None, *, option: str = "--wire") -> None:
        """``text``: ``ipc`` or ``tcp://INTERFACE[:PORT]``; ``option``: its name in messages.

        Raises:
            ConfigError: not of those forms, every interface at once, or one that others can
                reach while there is no secret.
        """
        self._text = text
        self._option = option
        self.curve = curve
        self._folder: RunFolder | None = None
        self._endpoint = None if text == "ipc" else _tcp_endpoint(text, curve, option)

    def open(self, socket: zmq.Socket[bytes]) -> str:
        """Bind ``socket``; the address that peers connect to.

        Raises:
            ConfigError: there is no such interface, the port is taken, or the path is too long.
        """
        endpoint = self._endpoint if self._endpoint is not None else f"ipc://{self._ipc_path()}"
        if self.curve is not None:
            self.curve.serve(socket)
        socket.ipv6 = "[" in endpoint
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{self._option}: cannot listen on {endpoint}: {error.strerror}: "
                "name an interface of this machine and a port that is free"
            ) from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Remove the socket's folder. Idempotent."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _ipc_path(self) -> Path:
        sweep()
        self._folder = RunFolder()
        path = self._folder.path / "wire"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            self.close()
            raise ConfigError(
                f"{self._option}: {path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix "
                "socket's path: set TMPDIR to a shorter folder"
            )
        return path


def _tcp_endpoint(text: str, curve: Curve | None, option: str) -> str:
    scheme, _, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, "*"
    if scheme != "tcp" or not host or not (port == "*" or port.isdecimal()):
        raise ConfigError(f"{option}: got {text!r}, wanted ipc or tcp://INTERFACE[:PORT]")
    host = "127.0.0.1" if host == "localhost" else host
    if host in ("*", "0.0.0.0", "[::]"):
        raise ConfigError(
            f"{option}: {text} would listen on every interface: name one, such as tcp://eth0"
        )
    if curve is None and not _is_loopback(host):
        raise ConfigError(
            f"{option}: {text} can be reached from other machines and there is no secret: "
            "set MSTAR_TP_SECRET (or MSTAR_TP_SECRET_FILE) to the same value on every machine, "
            "or listen on tcp://127.0.0.1"
        )
    return f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "lo":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
