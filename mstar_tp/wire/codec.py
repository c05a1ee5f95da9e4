"""Frames: the typed messages as MessagePack bytes, numbered by their sender.

A frame is the array ``[n, epoch, body]``: the sender's number, the group's epoch, and one tagged
message. Decoding validates every field against the message's type, so nothing half-formed gets past
this module; whatever the bytes are, the outcome is a message or a WireError. No state, any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from mstar_tp.common.errors import WireError

Body = TypeVar("Body")

Count = Annotated[int, msgspec.Meta(ge=0)]


class Frame(
    msgspec.Struct,
    Generic[Body],
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
):
    """One message on the wire: the ``n``-th of its sender in ``epoch``."""

    n: Count
    epoch: Count
    body: Body


Tamper = Callable[[bytes], Sequence[bytes]]
"""The change that a test makes to a stream: the frames that leave in place of one."""

_encoder = msgspec.msgpack.Encoder()


def encode(n: int, epoch: int, body: object) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(Frame(n, epoch, body))


class Codec(Generic[Body]):
    """Decodes the frames of one stream, whose bodies are of the types it was made for."""

    def __init__(self, *types: Any) -> None:
        """``types``: the message classes, or unions of them, that this stream may carry."""
        union: Any = types[0]
        for body in types[1:]:
            union = union | body
        self._decoder: msgspec.msgpack.Decoder[Frame[Body]] = msgspec.msgpack.Decoder(Frame[union])

    def decode(self, data: bytes | memoryview, who: str) -> Frame[Body]:
        """The frame in ``data``, which ``who`` sent.

        Raises:
            WireError: the bytes are not one whole, valid frame of this stream.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"{who} sent a malformed frame of {len(data)} bytes: {error}: "
                "run the same version of mstar_tp on every machine"
            ) from None


class StreamNumbers:
    """Checks that one sender's frames arrive whole and in order: its next number, its epoch."""

    def __init__(self, who: str, epoch: int, first: int = 0) -> None:
        self._who = who
        self._epoch = epoch
        self._next = first

    def accept(self, frame: Frame[Any]) -> bool:
        """Count ``frame``; False when it is of an earlier, dead epoch and is to be dropped.

        Raises:
            WireError: a gap, a repeat, or an epoch that has not begun.
        """
        if frame.epoch < self._epoch:
            return False
        if frame.epoch > self._epoch:
            raise WireError(
                f"{self._who} sent a frame of epoch {frame.epoch}, wanted epoch {self._epoch}"
            )
        if frame.n != self._next:
            what = "frames were lost" if frame.n > self._next else "a frame was repeated"
            raise WireError(
                f"{self._who} sent frame {frame.n}, wanted frame {self._next} "
                f"of epoch {self._epoch}: {what}"
            )
        self._next += 1
        return True
