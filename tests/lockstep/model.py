"""An explicit-state model of the lockstep protocol, explored over every interleaving.

A conductor with its clients, a leader and one or two followers. Two channels reach a follower: the
conductor's messages, and the leader's order. What all ranks share is the product's own code
(``model_tables``); what a rank does in one locked section is one transition (``model_rank``), and
so is a turn of the leader's loop (``model_leader``). This file puts them side by side and asks what
may happen next; ``model_search`` asks what can be reached, ``model_cases`` says where.

Delays. A message that its receiver has not taken yet may wait for ever, so a channel needs no state
but its content. The order is kept as one log: messages of the conductor stand in it where the first
entry that counts them stands (R1), so a follower that waits for a body is one that has not taken
the next item. The conductor makes its next message when a rank takes it: to whom nothing has come,
nothing was said. Reports reach the leader in any order.

Left out: KV pages and preemption (a pool of their own, with no copies to wait for), base rows, and
what a refused step makes void, since that a step is refused is a violation here.

Reductions (``Config.reduce``), which hide nothing: ``model_reductions``.

``python tests/lockstep/model.py --deep`` explores more than the tests do; ``--variant NAME`` tells
how a refuted variant goes wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from model_conductor import Conductors
from model_config import Config, ViolationError, kept
from model_leader import Leaders, Turned
from model_rank import Ranks
from model_reductions import Reductions
from model_state import (
    AGREED,
    AGREED_AGAIN,
    LAUNCHED,
    QUEUED,
    RUNS,
    VOTED,
    VOTED_AGAIN,
    WAITS,
    Done,
)

State = tuple[int, ...]
"""Numbers of: conductor, leader's main thread, log, reports; then of each rank; then how far each
follower has come in the log."""
Label = tuple[Any, ...]


class Model:
    """The transitions of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ranks = Ranks(config)
        self.leaders = Leaders(self.ranks)
        self.known: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self.variant = config.variant
        self._reduce = config.variant is None if config.reduce is None else config.reduce
        self._reductions = Reductions(self)
        self._things: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self.conductors = Conductors(config)
        self.first_place = 4 + config.ranks

    def get(self, number: int) -> Any:
        return self._things[number]

    def put(self, thing: Any) -> int:
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def start(self) -> State:
        """Every rank serves the configured adapters; nothing was asked."""
        config = self.config
        done = self.ranks.start()
        leader = self.leaders.start(done)
        others = (0,) * (config.ranks - 1)
        ranks = (done.rank,) * config.ranks
        return (self.conductors.start(), leader, self.put(()), self.put(()), *ranks, *others)

    # ------------------------------------------------------------------ what may happen next

    def after(self, state: State) -> list[tuple[Label, State]]:
        """Every transition from ``state``, with what it is.

        Raises:
            ViolationError: one of them breaks an invariant (``last`` says which).
        """
        found = [(label, self.settled(after)) for label, after in self._steps(state)]
        return found

    def settled(self, state: State) -> State:
        """``state`` after what is taken at once, with alike followers in one order."""
        return self._reductions.settled(state) if self._reduce else state

    def _steps(self, state: State) -> Iterator[tuple[Label, State]]:
        yield from self._leader_takes(state)
        yield from self._followers_take(state)
        yield from self._readers(state)
        yield from self._step_threads(state)

    def _leader_takes(self, state: State) -> Iterator[tuple[Label, State]]:
        conductor, leader, _, reports, rank = state[:5]
        self.last: Label = ("leader",)
        for after, body in self.conductors.next_commands(conductor, self._checked(state)):
            self.last = ("leader takes", body)
            turned = self.leaders.take_body(leader, rank, body)
            yield self.last, self.turned((after, *state[1:]), turned)
        for report in dict.fromkeys(self.get(reports)):
            self.last = ("leader notes", report)
            turned = self.leaders.take_report(leader, rank, report)
            yield self.last, self.turned(self.without_report(state, report), turned)
        if self.leaders.get(leader).awake or not self.config.wakes:
            self.last = ("leader turns", ())
            turned = self.leaders.turn(leader, rank)
            self.last = ("leader turns", turned.items)
            if turned != (leader, rank, (), ()):
                yield self.last, self.turned(state, turned)

    def _followers_take(self, state: State) -> Iterator[tuple[Label, State]]:
        for rank in range(1, self.config.ranks):
            after = self._take(state, rank)
            if after is not None:
                yield self.last, after
            if self.config.early:
                yield from self._take_early(state, rank)
            if self.variant == "remove on arrival":
                yield from self._remove_on_arrival(state, rank)

    def _readers(self, state: State) -> Iterator[tuple[Label, State]]:
        conductor = self.conductors.get(state[0])
        outcomes = ("in", *self.config.wrong) if conductor.faults else ("in",)
        for rank in range(self.config.ranks):
            for early, key in self.ranks.landings(state[4 + rank]):
                for outcome in outcomes:
                    self.last = ("lands", rank, key, outcome)
                    after = state
                    if outcome != "in":
                        after = (self.conductors.wrong(state[0], key), *state[1:])
                    done = self.ranks.land(state[4 + rank], early, key, outcome)
                    yield self.last, self.with_rank(after, rank, done.rank, done.reports)

    def _step_threads(self, state: State) -> Iterator[tuple[Label, State]]:
        ranks, num = self.ranks, self.config.ranks
        phases = [ranks.phase(state[4 + rank]) for rank in range(num)]
        for rank, phase in enumerate(phases):
            now = state[4 + rank]
            if phase == QUEUED:
                self.last = ("begins", rank)
                after = self.with_rank(state, rank, ranks.begin(now))
                yield self.last, self._woken(after, rank)
            elif phase in (AGREED, AGREED_AGAIN):
                self.last = ("settles", rank)
                yield self.last, self._settle(state, rank)
            elif phase == WAITS and ranks.reads_are_over(now):
                self.last = ("looks again", rank)
                yield self.last, self.with_rank(state, rank, ranks.look_again(now))
            elif phase == RUNS:
                self.last = ("ends", rank)
                yield self.last, self._finish(state, rank)
        if phases[0] in (VOTED, VOTED_AGAIN, LAUNCHED) and len(set(phases)) == 1:
            self.last = ("all agree",) if phases[0] != LAUNCHED else ("all run",)
            yield self.last, self.together(state, phases[0])

    def _checked(self, state: State) -> int:
        if not self.conductors.generations:
            return 0
        checked = -1
        for rank in state[4 : 4 + self.config.ranks]:
            checked &= self.ranks.get(rank).checked
        return checked

    # ------------------------------------------------------------------ leader and log

    def turned(self, state: State, turned: Turned) -> State:
        if turned.failed:
            conductor = self.conductors.get(state[0])
            for rid in turned.failed:
                if not conductor.faulted >> conductor.keys[rid] & 1:
                    raise ViolationError(
                        "nobody else fails", f"request {rid} failed, and no read of its adapter did"
                    )
        log = self._appended(state[2], turned.items) if turned.items else state[2]
        return (state[0], turned.leader, log, state[3], turned.rank, *state[5:])

    @kept
    def _appended(self, log: int, items: tuple[Label, ...]) -> int:
        return self.put((*self.get(log), *items))

    @kept
    def _shortened(self, log: int, count: int) -> int:
        return self.put(self.get(log)[count:])

    def with_rank(
        self, state: State, rank: int, now: int, reports: tuple[tuple[int, int, str], ...] = ()
    ) -> State:
        """``state`` with another state of one rank, and what it reports."""
        after = (*state[: 4 + rank], now, *state[5 + rank :])
        if reports:
            sent = tuple((rank, *report) for report in reports)
            after = (*after[:3], self._reported(state[3], sent), *after[4:])
            if rank == 0:
                own = self.variant in ("no agreement", "admit before copies")
                after = (after[0], self.leaders.wake(after[1], own), *after[2:])
        return after

    @kept
    def _reported(self, reports: int, sent: tuple[Label, ...]) -> int:
        return self.put(tuple(sorted((*self.get(reports), *sent))))

    def without_report(self, state: State, report: Label) -> State:
        left = list(self.get(state[3]))
        left.remove(report)
        return (*state[:3], self.put(tuple(left)), *state[4:])

    # ------------------------------------------------------------------ followers' main threads

    def _take(self, state: State, rank: int) -> State | None:
        """The follower applies the next item of the order, if it may."""
        place = self.first_place + rank - 1
        log = self.get(state[2])
        if state[place] == len(log) or not self.may_take(state[4 + rank], log[state[place]]):
            return None
        item = log[state[place]]
        self.last = ("follows", rank, item)
        now, reports, _ = self.taken(state[4 + rank], item)
        after = self.with_rank(state, rank, now, reports)
        return self.without_passed((*after[:place], state[place] + 1, *after[place + 1 :]))

    def without_passed(self, state: State) -> State:
        """``state`` without the head of the log that every follower has applied."""
        first = self.first_place
        passed = min(state[first:])
        if not passed:
            return state
        places = (place - passed for place in state[first:])
        return (*state[:2], self._shortened(state[2], passed), *state[3:first], *places)

    @kept
    def may_take(self, number: int, item: Label) -> bool:
        """Whether the fence lets the item through (R3, R4)."""
        if item[0] in ("body", "step"):
            return True
        if item[0] == "remove" and self.ranks.get(number).ahead >> item[1] & 1:
            return True
        if self.variant == "no fence":
            return True
        gone = item[0] != "remove" or not self.ranks.runs(number, item[1])
        return gone and self.ranks.settled(number)

    @kept
    def taken(self, number: int, item: Label) -> tuple[int, tuple[Any, ...], bool]:
        """The follower after the item, its reports, and whether no landing minds when it comes."""
        ranks = self.ranks
        if item[0] in ("remove", "drop", "forget") and not ranks.settled(number):
            raise ViolationError("fence", f"a {item[0]} lands inside an admit on a follower")
        match item:
            case ("body", body, cpu_cache):
                done = ranks.body(number, body)
            case ("step", rows, cpu_cache, slots):
                self._equal(number, cpu_cache)
                return ranks.announce(number, rows, slots), (), True
            case ("remove", rid, cpu_cache, slots):
                rank = ranks.get(number)
                if rank.ahead >> rid & 1:
                    return ranks.put(rank._replace(ahead=rank.ahead & ~(1 << rid))), (), True
                done = ranks.remove(number, rid)
                self._equal(done.rank, cpu_cache, slots)
            case ("drop", key, fetch_no, cpu_cache, slots):
                done = ranks.drop(number, key, fetch_no)
                self._equal(done.rank, cpu_cache, slots)
            case ("forget", cpu_cache, slots):
                done = ranks.forget(number)
                self._equal(done.rank, cpu_cache, slots)
            case _:
                raise AssertionError(item)
        self._equal(done.rank, cpu_cache)
        ranks.check(done.rank)
        reading = any(ranks.reads(number, key) for key in done.dropped)
        return done.rank, done.reports, not reading

    def _equal(self, number: int, cpu_cache: int, slots: int | None = None) -> None:
        rank = self.ranks.get(number)
        if rank.cpu_cache != cpu_cache:
            raise ViolationError("equal tables", "a follower's CPU cache differs from the leader's")
        if slots is not None and rank.slots != slots:
            raise ViolationError("equal tables", "a follower's slots differ from the leader's")

    def _take_early(self, state: State, rank: int) -> Iterator[tuple[Label, State]]:
        """A body comes before its place in the order, and maybe starts a read."""
        for conductor, body in self._commands_ahead(state, rank):
            if body[0] == "new":
                self.last = ("comes early", rank, body)
                now = self.ranks.early(state[4 + rank], body[2]).rank
                if now != state[4 + rank] or conductor != state[0]:
                    yield self.last, self.with_rank((conductor, *state[1:]), rank, now)

    def _commands_ahead(self, state: State, rank: int) -> Iterator[tuple[int, Label]]:
        """Bodies the follower has not applied, and the conductor then. The channel is in order, but
        a body that starts no read leaves no trace; so any of them may be the one that came last.
        """
        log = self.get(state[2])[state[self.first_place + rank - 1] :]
        uncounted = self.leaders.get(state[1]).uncounted
        for item in (*log, *uncounted):
            if item[0] == "body":
                yield state[0], item[1]
        yield from self.conductors.ahead(state[0], self._checked(state))

    def _remove_on_arrival(self, state: State, rank: int) -> Iterator[tuple[Label, State]]:
        """Variant: the next schedule entry is a remove; commands before it may lack."""
        log = self.get(state[2])[state[self.first_place + rank - 1] :]
        entry = next((item for item in log if item[0] != "body"), None)
        now = self.ranks.get(state[4 + rank])
        if entry is not None and entry[0] == "remove" and not now.ahead >> entry[1] & 1:
            self.last = ("removes on arrival", rank, entry)
            if not self.ranks.settled(state[4 + rank]):
                raise ViolationError("fence", "a remove lands inside an admit on a follower")
            done = self.ranks.remove(state[4 + rank], entry[1])
            after = self.ranks.get(done.rank)
            marked = self.ranks.put(after._replace(ahead=after.ahead | 1 << entry[1]))
            yield self.last, self.with_rank(state, rank, marked, done.reports)

    # ------------------------------------------------------------------ step threads

    def _woken(self, state: State, rank: int) -> State:
        """The leader's step thread wakes its main thread at a launch, which may send another."""
        launched = rank == 0 and self.ranks.phase(state[4]) >= LAUNCHED
        if not launched or self.config.window == 1:
            return state
        return (state[0], self.leaders.wake(state[1]), *state[2:])

    def _settle(self, state: State, rank: int) -> State:
        done = self.settle_rank(state[4 + rank], f"rank {rank}")
        after = self.with_rank(state, rank, done.rank)
        if rank == 0 and done.grew:
            after = (after[0], self.leaders.wake(after[1], True, False), *after[2:])
        return self._woken(after, rank)

    def settle_rank(self, number: int, who: str) -> Done:
        done = self.ranks.settle(number)
        if self.ranks.phase(done.rank) == WAITS and not self.config.may_wait:
            raise ViolationError("no step waits for a read", f"{who} waits in an admit")
        return done

    def _finish(self, state: State, rank: int) -> State:
        now = self.ranks.finish(state[4 + rank])
        if rank != 0:
            return self.with_rank(state, rank, now)
        leader = self.leaders.result(state[1], state[4])
        if self.config.window == 1 or self.ranks.phase(now) == -1:
            leader = self.leaders.wake(leader)
        return (state[0], leader, *state[2:4], now, *state[5:])

    def together(self, state: State, phase: int) -> State:
        """A collective that all ranks have entered."""
        ranks, num = self.ranks, self.config.ranks
        heads = [ranks.get(number).steps[0] for number in state[4 : 4 + num]]
        if len({head.rows for head in heads}) > 1:
            raise ViolationError("one order", "ranks meet in the collectives of different steps")
        if phase == LAUNCHED:
            if len({(head.runs, head.settled) for head in heads}) > 1:
                raise ViolationError("equal tables", "ranks run a step on other slots or rows")
            now = [ranks.run(number) for number in state[4 : 4 + num]]
        else:
            if len({tuple(miss[:2] for miss in head.misses) for head in heads}) > 1:
                raise ViolationError("equal tables", "ranks miss different adapters")
            votes = [ranks.vote(state[4 + rank], rank) for rank in range(num)]
            lowest = tuple(map(min, zip(*votes, strict=True)))
            now = [ranks.agreed(state[4 + rank], lowest, rank) for rank in range(num)]
        return (*state[:4], *now, *state[4 + num :])

    # ------------------------------------------------------------------ ends

    def is_done(self, state: State) -> bool:
        """Whether everything that was asked is over on every rank, and nothing is left of it."""
        leader = self.leaders.get(state[1])
        if not self.conductors.all_said(state[0]):
            return False
        if leader.awake or leader.uncounted or leader.sent or self.get(state[2]):
            return False
        if not self.config.wakes and self.leaders.turn(state[1], state[4])[:2] != (
            state[1],
            state[4],
        ):
            return False
        ranks = [self.ranks.get(number) for number in state[4 : 4 + self.config.ranks]]
        return not any(rank.open or rank.steps for rank in ranks)

    def check_end(self, state: State) -> None:
        """Nothing is held for requests that are gone.

        Raises:
            ViolationError: something is.
        """
        leader = self.leaders.get(state[1])
        left = leader.waiting or leader.queue or leader.running or leader.claims or leader.ending
        ranks = [self.ranks.get(number) for number in state[4 : 4 + self.config.ranks]]
        if left or any(rank.assigned or rank.dead or rank.to_forget for rank in ranks):
            raise ViolationError("nothing leaks", "requests are gone, and what they held is not")
        failed = self.ranks.copies.ask(leader.copies, "unannounced")
        slots = self.ranks.slots.look(ranks[0].slots)
        if any(slots.resident(failure[0]) is None for failure in failed):
            raise ViolationError("nothing leaks", "a copy that failed is still held")
        tables = {(r.cpu_cache, r.slots, r.served, r.files) for r in ranks}
        holders = [row[2] for row in slots.rows()]
        if len(tables) > 1 or any(holders):
            raise ViolationError("equal tables", "ranks end with different tables")


if __name__ == "__main__":
    from model_search import main

    main()
