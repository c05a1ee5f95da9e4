"""What the search of the lockstep model leaves out (``Config.reduce``), and why nothing is lost.

Each takes at once an action that commutes with all that may happen before it, that nothing disables
and no invariant sees. Whatever the full exploration reaches, the reduced one reaches after taking
the actions that were put off, so it finds the same violations and dead ends:

* A collective that all ranks have entered is over at once: what they brought is fixed.
* A follower's admit begins at once if it looks at no copy, or only at settled ones of adapters that
  are kept: no ingest drops those (checked). The rest of its admit and its commit follow at once:
  they write its slots, seats and dead rows, which no ingest and no landing reads.
* A follower takes the next item of its log at once unless that drops a copy which is being read (it
  may land first), or an admit that has not begun may look at the copies. With early reads, which
  look at how many are held, it never does.
* A report that settles nothing is noted at once: whatever comes first, it is counted or ignored
  just the same (it names its hold), and nothing looks at a copy before it is settled. Only where
  the leader may turn at any time (``Config.wakes`` is off), as a report also wakes it.
* Two followers are alike: states that differ by exchanging them are one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from model_config import OTHER, READING, kept
from model_state import AGREED, AGREED_AGAIN, LAUNCHED, QUEUED, RUNS, VOTED, VOTED_AGAIN

if TYPE_CHECKING:
    from model import Label, Model, State


class Reductions:
    """Of one model's states."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.known: dict[Any, dict[Any, Any]] = defaultdict(dict)

    def settled(self, state: State) -> State:
        """``state`` after what is taken at once, with alike followers in one order."""
        state = self._at_once(state)
        return self._in_order(state) if self._model.config.ranks == 3 else state

    def _at_once(self, state: State) -> State:
        """Take what happens the same whatever else happens first."""
        num, first = self._model.config.ranks, self._model.first_place
        while True:
            for rank in range(1, num):
                place = first + rank - 1
                now, there, reports = self._far(state[4 + rank], state[2], state[place])
                if now != state[4 + rank] or there != state[place]:
                    state = self._model.with_rank(state, rank, now, reports)
                    state = (*state[:place], there, *state[place + 1 :])
            phase = self._model.ranks.phase(state[4])
            if phase not in (VOTED, VOTED_AGAIN, LAUNCHED):
                break
            if any(self._model.ranks.phase(rank) != phase for rank in state[5:first]):
                break
            state = self._model.together(state, phase)
        return self._note_at_once(self._model.without_passed(state))

    def _note_at_once(self, state: State) -> State:
        if self._model.config.wakes or not self._model.get(state[3]):
            return state
        for report in self._model.get(state[3]):
            stale = self._model.ranks.fetches(state[4], report[1]) != report[2]
            good = stale or OTHER not in self._model.config.wrong
            if good and not self._model.leaders.settles(state[1], report):
                turned = self._model.leaders.take_report(state[1], state[4], report)
                state = self._model.turned(self._model.without_report(state, report), turned)
        return state

    @kept
    def _far(self, number: int, log: int, place: int) -> tuple[int, int, tuple[Label, ...]]:
        """How far a follower comes at once: itself, its place in the log, its reports."""
        ranks, items = self._model.ranks, self._model.get(log)
        reports: tuple[Label, ...] = ()
        while True:
            phase = ranks.phase(number)
            if phase in (AGREED, AGREED_AGAIN):
                number = self._model.settle_rank(number, "a follower").rank
            elif phase == RUNS:
                number = ranks.finish(number)
            elif phase == QUEUED and self._looks_final(ranks.begin(number)):
                number = ranks.begin(number)
            elif self._model.config.early or self._has_queued(number) or place == len(items):
                break
            elif self._model.may_take(number, items[place]):
                now, more, final = self._model.taken(number, items[place])
                if not final:
                    break
                number, place, reports = now, place + 1, reports + more
            else:
                break
        return number, place, reports

    @kept
    def _has_queued(self, number: int) -> bool:
        """Whether a step waits whose admit will look at the copies."""
        return any(step.phase == QUEUED for step in self._model.ranks.get(number).steps)

    @kept
    def _looks_final(self, number: int) -> bool:
        """Whether no landing and no ingest could have shown the admit other copies."""
        rank = self._model.ranks.get(number)
        return all(
            state not in (None, READING)
            and self._model.ranks.cpu_cache.ask(rank.cpu_cache, "keeps", key)
            for key, _, state in rank.steps[0].misses
        )

    def _in_order(self, state: State) -> State:
        """Followers 1 and 2 by the number of their state."""
        if (state[5], state[7]) <= (state[6], state[8]):
            return state
        conductor, leader, log, reports, rank, first, second, one, two = state
        return (
            conductor,
            self._leader_exchanged(leader),
            log,
            self._reports_exchanged(reports),
            rank,
            second,
            first,
            two,
            one,
        )

    @kept
    def _reports_exchanged(self, reports: int) -> int:
        other = (0, 2, 1)
        return self._model.put(
            tuple(sorted((other[r], *rest) for r, *rest in self._model.get(reports)))
        )

    @kept
    def _leader_exchanged(self, number: int) -> int:
        leader = self._model.leaders.get(number)
        other, copies = (0, 2, 1), 0
        for name, *rest in self._model.ranks.copies.calls(leader.copies):
            if name == "tell":
                rest[0] = other[rest[0]]
            copies = self._model.ranks.copies.do(copies, name, *rest)[0]
        return self._model.leaders.put(leader._replace(copies=copies))
