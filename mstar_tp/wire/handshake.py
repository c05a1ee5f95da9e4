"""The messages by which the two ends of a channel know each other.

They say who the ends are, whether a frame was lost, and how much of what was sent has been taken.
"""

from __future__ import annotations

from typing import Literal

from mstar_tp.wire.codec import Count
from mstar_tp.wire.values import Message


class Hello(Message, frozen=True, kw_only=True):
    """The first frame of every connection; a stranger or a rank with another config is refused.

    A peer opens two connections, and says on each which of the two it is: the one it receives on,
    or the one it sends on. ``group``: a name that all ranks that were started together have, and
    nobody else ever.
    """

    link: Literal["receive", "send"] = "receive"
    role: str
    rank: int
    world_size: int
    instance_id: str
    config_digest: str
    version: str
    group: str = ""


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to a Hello that was accepted: the group is this one in the frontend's count."""

    epoch: int


class Refused(Message, frozen=True, kw_only=True):
    """The answer to a Hello that was not: ``cause`` says what differs."""

    cause: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Nothing new: its number shows whether a frame before it was lost."""


class Ack(Message, frozen=True, kw_only=True):
    """A rank's owner has taken so many frames, of so many bytes, since its welcome."""

    frames: Count
    size: Count
