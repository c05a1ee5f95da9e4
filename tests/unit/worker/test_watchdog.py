"""Pins that a rank whose wait has no end ends itself, and one that was told to stop does not."""

from __future__ import annotations

import queue

import pytest

from mstar_tp.worker import watchdog
from mstar_tp.worker.watchdog import Watchdog

GUARD_S = 30.0


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[int]:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.01)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    return queue.SimpleQueue()


def test_a_lost_peer_ends_the_process_when_its_main_thread_does_not(
    ends: queue.SimpleQueue[int],
) -> None:
    out = Watchdog(1, ends.put)
    for _ in range(3):
        out.peer_lost("the leader: the connection closed")
    assert ends.get(timeout=GUARD_S) == 1
    assert ends.empty(), "once"


def test_a_step_that_hangs_is_told_and_ends_the_process(ends: queue.SimpleQueue[int]) -> None:
    out, said = Watchdog(1, ends.put), queue.SimpleQueue[str]()
    running_for_s = iter([0.0, 0.0, 0.3])
    out.watch_steps(lambda: next(running_for_s), 0.2, said.put)
    assert "rank 1: a step has run for more than 0.2 s" in said.get(timeout=GUARD_S)
    assert ends.get(timeout=GUARD_S) == 1


def test_peers_that_go_after_an_ordered_stop_are_no_failure(
    ends: queue.SimpleQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda self: started.append(self.name))
    out = Watchdog(0, ends.put)
    out.disarm()
    out.peer_lost("the frontend: the connection closed")
    assert started == [] and ends.empty()
