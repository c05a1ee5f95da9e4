"""CURVE keys from a shared secret: who may speak to this instance over TCP, and nobody else.

Both sides derive one long-term server key pair from the secret. A client cannot complete ZeroMQ's
CURVE handshake without the server's public key, which never travels in the clear and which only the
holders of the secret can compute; so the handshake itself authenticates the client, and every frame
is encrypted. Clients use a fresh key pair each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

from mstar_tp.common.errors import ConfigError

MIN_SECRET_CHARS = 16


@dataclass(frozen=True, slots=True, repr=False)
class Curve:
    """The instance's server key pair, Z85-encoded. Never logged: it has no useful repr."""

    public: bytes
    secret: bytes

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` accept only clients that know the secret. Before it binds."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` speak to this instance's servers only. Before it connects."""
        client_public, client_secret = zmq.curve_keypair()
        socket.curve_serverkey = self.public
        socket.curve_publickey = client_public
        socket.curve_secretkey = client_secret


@lru_cache(maxsize=4)
def curve_from_secret(secret: str) -> Curve:
    """The keys of the instance that shares ``secret``. About 50 ms, once a process.

    Raises:
        ConfigError: the secret is too short to keep anybody out.
    """
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"MSTAR_TP_SECRET has {len(secret)} characters, wanted at least {MIN_SECRET_CHARS}: "
            "generate one with `openssl rand -hex 32`"
        )
    key = hashlib.scrypt(
        secret.encode(), salt=b"mstar_tp curve server key", n=2**14, r=8, p=1, dklen=32
    )
    encoded = z85.encode(key)
    return Curve(public=zmq.curve_public(encoded), secret=encoded)
