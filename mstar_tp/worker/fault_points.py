"""Points at which a test may make a rank fail. Outside test mode they do nothing."""

from __future__ import annotations

from typing import Literal, Protocol

from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.resources.lora.cpu_cache.reads import Readers
from mstar_tp.wire.codec import Tamper

Point = Literal[
    "start", "load", "warm-up", "ready", "check", "step", "forward", "committed", "shutdown"
]
"""The points that a rank comes to.

Its process has begun; it is about to load its weights; to run its first forward, and what it
captures; to say that it is ready; to check an adapter for a load at run time; to run a step; that
step's admit is over; the step has been committed; the rank was told to stop.
"""


Stream = Literal["schedule", "reports", "copies", "commands"]
"""The streams of frames that a test may change.

They are the leader's schedule; a rank's reports to the frontend; a follower's reports to the
leader; the frontend's commands to every rank.
"""


class RankFaults(Protocol):
    """The hooks between a rank and the parts it works with."""

    def at(self, point: Point) -> None:
        """The rank is at ``point``. Any thread."""
        ...

    def readers(self, readers: Readers) -> Readers:
        """Those that the rank's pool uses instead."""
        ...

    def groups(self, groups: JointGroups) -> JointGroups:
        """Those that the rank's model and pool use instead."""
        ...

    def frames(self, stream: Stream) -> Tamper | None:
        """Return what happens to each frame of ``stream`` that this rank sends, or None.

        Of commands, they are the frames that it gets.
        """
        ...


class NoFaults:
    """All goes as it should."""

    def at(self, point: Point) -> None:
        pass

    def readers(self, readers: Readers) -> Readers:
        return readers

    def groups(self, groups: JointGroups) -> JointGroups:
        return groups

    def frames(self, stream: Stream) -> Tamper | None:
        return None


NO_FAULTS = NoFaults()
