"""Pins the table of the rank group's life: every state by every event, and what is refused.

Pins too what the server says in each state.
"""

from __future__ import annotations

from itertools import product

import pytest

from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.metrics.outcomes import GroupEnd
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.ranks.group_causes import GroupCauses
from mstar_tp.frontend.ranks.group_state import (
    LEAVING,
    SHUTTING_DOWN,
    TRANSITIONS,
    GroupEvent,
    GroupState,
    Phase,
    Service,
    Stop,
    TransitionError,
)
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import ConductorMessage, Shutdown
from mstar_tp.wire.reports import Fatal, Leaving, RankReport, Ready, StartFailed

# One row an event, one column a phase; "." is refused. Written by hand, apart from the program's.
PHASES = "STARTING  READY     LEAVING   DISMISSED LOST      DEAD"
TABLE = {
    "RESTORED": "READY     .         .         .         .         .",
    "ASKED_TO_STOP": "DISMISSED LEAVING   LEAVING   DISMISSED LOST      DEAD",
    "DRAINED": ".         .         DISMISSED .         .         .",
    "RANK_LOST": "LOST      LOST      LOST      DISMISSED LOST      DEAD",
    "AWAITED": ".         .         .         STARTING  STARTING  .",
    "TIMED_OUT": "STARTING  .         .         DISMISSED LOST      .",
    "GIVEN_UP": "DEAD      DEAD      DEAD      DEAD      DEAD      .",
    "SERVER_DRAINS": "STARTING  READY     READY     DISMISSED LOST      DEAD",
    "SERVER_STOPS": "STARTING  READY     READY     DISMISSED LOST      DEAD",
}
ROWS = {
    (Phase[phase], GroupEvent[event]): None if after == "." else Phase[after]
    for event, row in TABLE.items()
    for phase, after in zip(PHASES.split(), row.split(), strict=True)
}
STATES = list(product(Phase, Stop, (False, True)))


def state_of(phase: Phase, stop: Stop = Stop.NONE, held: bool = True) -> GroupState:
    state = GroupState(world_size=2)
    state.phase, state.stop, state.held = phase, stop, held
    return state


def test_the_table_has_every_event() -> None:
    assert set(TRANSITIONS) == set(GroupEvent)
    assert set(ROWS) == set(product(Phase, GroupEvent))


@pytest.mark.parametrize("event", GroupEvent)
@pytest.mark.parametrize(("phase", "stop", "held"), STATES)
def test_every_event_in_every_state(
    phase: Phase, stop: Stop, held: bool, event: GroupEvent
) -> None:
    state = state_of(phase, stop, held)
    void = (event is GroupEvent.ASKED_TO_STOP and stop is not Stop.NONE) or (
        event is GroupEvent.RANK_LOST and stop is Stop.ORDERED
    )
    after = phase if void else ROWS[phase, event]
    if after is None:
        with pytest.raises(TransitionError, match=f"{phase.name}: {event.name}"):
            state.apply(event)
        assert (state.phase, state.stop, state.held) == (phase, stop, held)
        return
    assert state.apply(event) is not void
    assert state.phase is after
    assert state.held is (held or (after is Phase.READY and event is GroupEvent.RESTORED)) & (
        event is not GroupEvent.TIMED_OUT
    )
    wanted = {GroupEvent.SERVER_DRAINS: Stop.DRAINING, GroupEvent.SERVER_STOPS: Stop.ORDERED}
    assert state.stop.value == max(stop.value, wanted.get(event, stop).value)


def named(phase: Phase, held: bool) -> str:
    if phase in (Phase.READY, Phase.LEAVING):
        return "ready"
    return "dead" if phase is Phase.DEAD else "down" if held else "starting"


@pytest.mark.parametrize(("phase", "stop", "held"), STATES)
def test_what_the_server_says_in_every_state(phase: Phase, stop: Stop, held: bool) -> None:
    state, name = state_of(phase, stop, held), named(phase, held)
    state.causes.said[1] = "out of memory"
    assert state.service.name.lower() == name
    leaving = phase is Phase.LEAVING
    text = {
        "starting": "the ranks are starting",
        "ready": "ready",
        "down": "the ranks are gone and are being started again",
        "dead": "the ranks are gone",
    }[name]
    if stop is not Stop.NONE:
        text, code = SHUTTING_DOWN, "draining"
    else:
        code = "leaving" if leaving else name
    if name in ("down", "dead"):
        text += ": rank 1: out of memory"
    assert state.reason() == (LEAVING if leaving else text)
    assert state.refusal_code == (None if code == "ready" else code)
    assert state.serves is (name == "ready" and stop is not Stop.ORDERED)
    assert state.draining is (stop is not Stop.NONE)
    takes = stop is Stop.NONE and name in ("ready", "down")
    assert state.takes_requests is takes
    for allowed, check, ends in (
        (takes, state.check_open, ": try again later"),
        (state.serves, state.check_serves, ""),
    ):
        if allowed:
            check()
        else:
            with pytest.raises(ApiError) as error:
                check()
            assert (error.value.status, error.value.code) == (503, "not_ready")
            assert error.value.message == state.reason() + ends


def test_a_fault_of_this_process_is_the_reason_whatever_ranks_said() -> None:
    state = state_of(Phase.DEAD)
    state.causes.said[0] = "out of memory"
    state.causes.fault = "the server failed on a rank's report: KeyError: 3"
    assert state.reason() == state.causes.fault


def test_why_the_last_group_ended_is_told_until_the_next_serves() -> None:
    causes = GroupCauses(world_size=2)
    causes.take(1, StartFailed(rank=1, cause="rank 1: no such folder"))
    causes.losses[0] = "its process ended with code 1"
    assert causes.lines() == ["rank 0: its process ended with code 1", "rank 1: no such folder"]
    causes.next_group(dismissed=False)
    assert causes.lines() == [] and len(causes.before) == 2
    assert causes.ends[GroupEnd.START_FAILED] == 1
    causes.next_group(dismissed=True)
    assert causes.before == ["the ranks were asked to stop"]
    causes.serves()
    assert causes.before == []


# ------------------------------------------------------------------ the group, by its reports


class Sent:
    outbox_full = False

    def __init__(self) -> None:
        self.messages: list[ConductorMessage] = []

    def send_all(self, message: ConductorMessage) -> None:
        self.messages.append(message)

    async def receive(self) -> tuple[int, RankReport | Lost]:
        raise NotImplementedError


def ready(rank: int) -> Ready:
    return Ready(
        rank=rank,
        vocab_size=9,
        max_model_len=9,
        num_pages=1,
        page_size=1,
        eos_token_ids=(1,),
        targets=(),
    )


@pytest.fixture
def conductor() -> Conductor:
    return Conductor(Sent(), ServedModels(("base",), "m", {}), world_size=2, max_queue=9)


def test_ranks_that_are_ready_after_one_was_lost_do_not_serve(conductor: Conductor) -> None:
    group, state = conductor.group, conductor.state
    group.take(1, Fatal(rank=1, cause="out of memory"))
    group.changed.clear()  # as the restart loop does while it waits for more causes
    for rank in range(2):
        group.take(rank, ready(rank))
    assert state.phase is Phase.LOST and not group.became_ready.is_set()
    group.await_next()
    for rank in range(2):
        group.take(rank, ready(rank))
    assert state.phase is Phase.READY and group.became_ready.is_set() and state.epoch == 1


def test_a_signal_before_the_ranks_serve_dismisses_them_at_once(conductor: Conductor) -> None:
    group, state, link = conductor.group, conductor.state, conductor._link
    group.take(0, Leaving(rank=0))
    assert isinstance(link, Sent) and link.messages == [Shutdown()]
    assert state.phase is Phase.DISMISSED and state.service is Service.STARTING
    group.take(0, Leaving(rank=0))
    group.lose(1, "its process ended with code 0")
    assert len(link.messages) == 1 and group.changed.is_set()
    group.await_next()
    assert state.causes.ends[GroupEnd.ASKED_TO_STOP] == 1 and state.phase is Phase.STARTING
