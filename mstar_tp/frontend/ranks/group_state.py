"""The state of the rank group and the one table of its transitions.

Used only on the event loop's thread. All readers of the ranks' state use ``GroupState``: routes,
metrics, the status page, the restart loop. ``GroupState.apply`` alone writes it, and only
``RankGroup`` calls that. Two things change: the phase of the present group, and how far the
server's shutdown is.
"""

from __future__ import annotations

from enum import Enum, auto

from mstar_tp.frontend.api.api_errors import unavailable
from mstar_tp.frontend.ranks.group_causes import GroupCauses


class Phase(Enum):
    """The phases of one group of ranks. ``STARTING`` covers first starts and restarts."""

    STARTING = auto()
    """Not every rank is ready, or the last group's adapters and requests are being restored."""
    READY = auto()
    LEAVING = auto()
    """A signal asked the ranks to stop: they finish their requests and get no new ones."""
    DISMISSED = auto()
    """The ranks were told to shut down cleanly; a new group will follow."""
    LOST = auto()
    """A rank is gone: the remaining ranks are ended, and a new group will follow."""
    DEAD = auto()
    """The ranks are gone, and no new group will follow."""


class Stop(Enum):
    """The steps of the server's own shutdown."""

    NONE = auto()
    DRAINING = auto()
    """No new request is taken."""
    ORDERED = auto()
    """The ranks were told to stop, so losing them is no failure."""


class GroupEvent(Enum):
    """Everything that can change the state."""

    RESTORED = auto()
    """Every rank is ready and has the last group's adapters and requests, if any."""
    ASKED_TO_STOP = auto()
    """A rank reported a signal that asks it to stop."""
    DRAINED = auto()
    """The leaving ranks have finished their requests, or the drain timed out."""
    RANK_LOST = auto()
    """A rank failed, or is gone."""
    AWAITED = auto()
    """All old ranks are gone: the wait for the next group begins."""
    TIMED_OUT = auto()
    """Ranks that torchrun starts did not connect in time: waiting requests fail."""
    GIVEN_UP = auto()
    """The ranks are not started again."""
    SERVER_DRAINS = auto()
    """The server stops taking requests."""
    SERVER_STOPS = auto()
    """The server tells the ranks to stop."""


# An event with this row is accepted in every phase and changes none.
_STAY = {phase: phase for phase in Phase}
_ENDING = (Phase.DISMISSED, Phase.LOST)
TRANSITIONS: dict[GroupEvent, dict[Phase, Phase]] = {
    GroupEvent.RESTORED: {Phase.STARTING: Phase.READY},
    GroupEvent.ASKED_TO_STOP: _STAY | {Phase.STARTING: Phase.DISMISSED, Phase.READY: Phase.LEAVING},
    GroupEvent.DRAINED: {Phase.LEAVING: Phase.DISMISSED},
    GroupEvent.RANK_LOST: _STAY
    | dict.fromkeys((Phase.STARTING, Phase.READY, Phase.LEAVING), Phase.LOST),
    GroupEvent.AWAITED: dict.fromkeys(_ENDING, Phase.STARTING),
    # The phase stays; ``apply`` clears ``held``.
    GroupEvent.TIMED_OUT: {phase: phase for phase in (Phase.STARTING, *_ENDING)},
    GroupEvent.GIVEN_UP: dict.fromkeys(set(Phase) - {Phase.DEAD}, Phase.DEAD),
    # The server's shutdown overrides a drain of the ranks: the server ends them itself.
    GroupEvent.SERVER_DRAINS: _STAY | {Phase.LEAVING: Phase.READY},
    GroupEvent.SERVER_STOPS: _STAY | {Phase.LEAVING: Phase.READY},
}
"""event -> phase -> next phase. An event not listed for a phase raises TransitionError."""


class Service(Enum):
    """The ranks' condition as reported to clients."""

    STARTING = "the ranks are starting"
    READY = "ready"
    DOWN = "the ranks are gone and are being started again"
    DEAD = "the ranks are gone"


SHUTTING_DOWN = "the server is shutting down"
LEAVING = "the ranks were asked to stop and leave: new requests wait for the next ranks"


class TransitionError(Exception):
    """An event came in a phase in which it cannot happen, which is a bug of ours."""


class GroupState:
    """The phase of the present group, the server's stop, and why groups end."""

    def __init__(self, world_size: int) -> None:
        self.phase = Phase.STARTING
        self.stop = Stop.NONE
        self.held = False
        """True once any group has served: requests then wait during a restart."""
        self.causes = GroupCauses(world_size)

    def apply(self, event: GroupEvent) -> bool:
        """Make the transition that ``event`` asks for; False if it is ignored.

        Events are ignored that the server's shutdown makes meaningless.

        Raises:
            TransitionError: the event cannot happen in this phase.
        """
        if event is GroupEvent.ASKED_TO_STOP and self.draining:
            return False  # the server ends the ranks in any case
        if event is GroupEvent.RANK_LOST and self.stop is Stop.ORDERED:
            return False  # the ranks were told to stop
        phase = TRANSITIONS[event].get(self.phase)
        if phase is None:
            raise TransitionError(
                f"the rank group is {self.phase.name}: {event.name} is not allowed"
            )
        self.phase = phase
        if event is GroupEvent.RESTORED:
            self.held = True
        elif event is GroupEvent.TIMED_OUT:
            self.held = False
        elif event is GroupEvent.SERVER_STOPS:
            self.stop = Stop.ORDERED
        elif event is GroupEvent.SERVER_DRAINS and self.stop is Stop.NONE:
            self.stop = Stop.DRAINING
        return True

    # ------------------------------------------------------------------ reading

    @property
    def epoch(self) -> int:
        """The number of groups that ended and were followed by others."""
        return sum(self.causes.ends.values())

    @property
    def up(self) -> bool:
        """True while every rank of the group is ready and none is gone."""
        return self.phase in (Phase.READY, Phase.LEAVING)

    @property
    def ending(self) -> bool:
        """True once the present group will serve no more."""
        return self.phase in (*_ENDING, Phase.DEAD)

    @property
    def serves(self) -> bool:
        """True while the ranks take messages."""
        return self.up and self.stop is not Stop.ORDERED

    @property
    def takes_requests(self) -> bool:
        """True while requests are taken: by the ranks, or to wait for the next ones."""
        return not self.draining and self.service in (Service.READY, Service.DOWN)

    @property
    def draining(self) -> bool:
        """True once the server takes nothing new because it is about to stop."""
        return self.stop is not Stop.NONE

    @property
    def leaving(self) -> bool:
        """True while the ranks drain because a signal asked them to stop."""
        return self.phase is Phase.LEAVING

    @property
    def service(self) -> Service:
        """The phase as clients are told of it."""
        if self.up:
            return Service.READY
        if self.phase is Phase.DEAD:
            return Service.DEAD
        return Service.DOWN if self.held else Service.STARTING

    @property
    def refusal_code(self) -> str | None:
        """The error code of ``GET /health``; None while requests are served."""
        if self.draining:
            return "draining"
        if self.leaving:
            return "leaving"
        return None if self.up else self.service.name.lower()

    def reason(self) -> str:
        """One sentence that says why requests are not served now."""
        if self.leaving:
            return LEAVING
        said = SHUTTING_DOWN if self.draining else self.service.value
        if self.service not in (Service.DOWN, Service.DEAD):
            return said
        if self.causes.fault is not None:
            return self.causes.fault
        why = "; ".join(self.causes.lines() or self.causes.before)
        return f"{said}: {why}" if why else said

    def check_open(self) -> None:
        """Raises ApiError: 503, no request is taken now."""
        if not self.takes_requests:
            raise unavailable(f"{self.reason()}: try again later", code="not_ready")

    def check_serves(self) -> None:
        """Raises ApiError: 503, the ranks take no messages now."""
        if not self.serves:
            raise unavailable(self.reason(), code="not_ready")
