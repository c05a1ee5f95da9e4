"""An orderly stop: the leader may leave before a follower has the frontend's Shutdown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mstar_tp.common.errors import PeerLostError
from mstar_tp.wire.commands import Shutdown
from mstar_tp.wire.schedule import Advance
from mstar_tp.worker.follower import Follower
from mstar_tp.worker.waker import Waker


class _Channel:
    """Gives out one batch of messages a turn, and is lost after the turn ``lost_at``."""

    def __init__(self, batches: list[list[Any]], lost_at: int | None) -> None:
        self._batches = batches
        self._lost_at = lost_at
        self._turn = 0
        self.lost: str | None = None

    def receive(self) -> list[Any]:
        self._turn += 1
        if self._turn - 1 == self._lost_at:
            self.lost = "the connection closed"
        return self._batches.pop(0) if self._batches else []


class _State:
    rank = 1
    lora = None

    def __init__(self) -> None:
        self.ingested = 0
        self.applied: list[Any] = []
        self.recorder = SimpleNamespace(put=lambda entry: None)

    def answer(self, message: Any) -> None:
        """Nobody asks."""

    def apply(self, message: Any) -> None:
        self.applied.append(message)
        self.ingested += 1


def _follow(monkeypatch: pytest.MonkeyPatch, order: _Channel, link: _Channel) -> _State:
    for channel in (order, link):
        channel.poll_socket = None  # type: ignore[attr-defined]
    state, waker = _State(), Waker()
    monkeypatch.setattr(waker, "poller", lambda *_: SimpleNamespace(poll=lambda _: [1]))
    steps = SimpleNamespace(results=lambda: [])
    parts: Any = (state, steps, None, None, link, order, waker)
    try:
        Follower(*parts).run()
    finally:
        waker.close()
    return state


def test_a_leader_that_leaves_after_the_stop_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _Channel([[Advance(ingested=1, last=True)]], lost_at=0)
    link = _Channel([[Shutdown()]], lost_at=None)
    assert _follow(monkeypatch, order, link).applied == [Shutdown()]


def test_a_follower_awaits_a_stop_that_the_leader_had_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = _Channel([[Advance(ingested=1, last=True)]], lost_at=0)
    link = _Channel([[], [], [], [Shutdown()]], lost_at=None)
    assert _follow(monkeypatch, order, link).applied == [Shutdown()]


@pytest.mark.parametrize("entries", [[], [Advance(ingested=1)]])
def test_a_leader_that_is_gone_without_a_stop_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, entries: list[Any]
) -> None:
    with pytest.raises(PeerLostError, match="the leader is gone: the connection closed"):
        _follow(monkeypatch, _Channel([entries], lost_at=1), _Channel([], lost_at=None))


def test_a_frontend_that_is_gone_before_its_stop_came_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = _Channel([[Advance(ingested=1, last=True)]], lost_at=0)
    with pytest.raises(PeerLostError, match="the frontend is gone"):
        _follow(monkeypatch, order, _Channel([], lost_at=2))
