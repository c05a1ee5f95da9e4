"""The leader's main thread in the lockstep model, one turn of its loop after another.

Taking a message or a report is a transition of its own, as each is a locked section of its own;
what the loop does after them (scan, results, removes, the next step, an Advance) is one, since it
reads nothing that another thread changes meanwhile. The order of takes is freer than the loop's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from model_config import ViolationError, bits, kept
from model_pool import LeaderPool
from model_rank import Ranks
from model_state import Done, Rank

from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.resources.lora.adapters import AdapterTable
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.engine.scheduling.admission import AdmissionQueue

Item = tuple[Any, ...]
Sight = tuple[int, ...]
"""States of the leader's copy, tier and slot tables, then its seated and its dead requests."""


class Leader(NamedTuple):
    """Sets of requests are bit masks."""

    copies: int = 0
    waiting: int = 0
    """Those that wait for their copies."""
    queue: tuple[int, ...] = ()
    tried: tuple[tuple[int, int | None], ...] = ()
    grew: bool = False
    running: int = 0
    claims: int = 0
    ending: tuple[int, ...] = ()
    """Those that ended and whose remove is not sent."""
    awake: bool = False
    """Whether something came that the loop has not turned for."""
    sent: int = 0
    """Steps sent whose result is not taken."""
    results: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """(rows that ran, rows that failed) of steps that are over."""
    uncounted: tuple[Item, ...] = ()
    """Messages applied that no order entry counts yet."""
    waits: tuple[tuple[int, int, int], ...] = ()
    """(waiting request, steps it may wait, steps it has waited), where ``Config.bound`` asks."""


class Turned(NamedTuple):
    """What a transition of the leader made: its main thread, its rank, entries for the order."""

    leader: int
    rank: int
    items: tuple[Item, ...] = ()
    failed: tuple[int, ...] = ()


class Leaders:
    """Transitions of the leader's main thread."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.config = ranks.config
        self.variant = ranks.variant
        self._pool = LeaderPool(ranks)
        self.known: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self._leaders: list[Leader] = []
        self._numbers: dict[Leader, int] = {}

    def get(self, number: int) -> Leader:
        return self._leaders[number]

    def put(self, leader: Leader) -> int:
        number = self._numbers.setdefault(leader, len(self._leaders))
        if number == len(self._leaders):
            self._leaders.append(leader)
        return number

    def start(self, done: Done) -> int:
        """The leader of a rank that has just started."""
        main = _Main(self, Leader(), done.rank)
        main.follow(done)
        return main.turned().leader

    # ------------------------------------------------------------------ taking

    @kept
    def take_body(self, number: int, rank: int, body: tuple[Any, ...]) -> Turned:
        """Apply a conductor message, and do what only the leader does about it."""
        main = _Main(self, self.get(number), rank)
        main.follow(self.ranks.body(rank, body))
        main.awake = self.config.wakes
        main.uncounted = (*main.uncounted, ("body", body, main.rank_now().cpu_cache))
        if body[0] == "new":
            rid = body[1]
            if main.rank_now().dead >> rid & 1:
                main.fail(rid)
            else:
                main.waiting |= 1 << rid
        elif body[0] == "abort" and main.rank_now().open >> body[1] & 1:
            main.end(body[1])
        return main.turned()

    @kept
    def take_report(self, number: int, rank: int, report: tuple[int, int, int, str]) -> Turned:
        """Note what a rank's reader came to: (rank, adapter, fetch number, outcome)."""
        main = _Main(self, self.get(number), rank)
        main.awake = self.config.wakes
        reporter, key, fetch_no, outcome = report
        if self.variant == "no fetch numbers":
            fetch_no = (
                self.ranks.cpu_cache.ask(main.rank_now().cpu_cache, "cpu_cache.number", key)
                or fetch_no
            )
        main.copies, settled = self.ranks.copies.do(
            main.copies, "tell", reporter, key, fetch_no, outcome
        )
        main.grew |= settled
        return main.turned()

    @kept
    def settles(self, number: int, report: tuple[int, int, int, str]) -> bool:
        """Whether the report makes a copy complete, or is its first failure."""
        settled: bool = self.ranks.copies.ask(self.get(number).copies, "tell", *report)
        return settled

    @kept
    def wake(self, number: int, grew: bool = False, awake: bool = True) -> int:
        """The step thread has moved on."""
        leader = self.get(number)
        awake = leader.awake or (awake and self.config.wakes)
        return self.put(leader._replace(awake=awake, grew=leader.grew or grew))

    @kept
    def result(self, number: int, rank: int) -> int:
        """The head step of the leader's own rank is over."""
        step = self.ranks.get(rank).steps[0]
        leader = self.get(number)
        result = (tuple(rid for rid in step.runs), step.failed)
        return self.put(leader._replace(results=(*leader.results, result)))

    # ------------------------------------------------------------------ turning

    @kept
    def turn(self, number: int, rank: int) -> Turned:
        """All that the loop does after taking what has come."""
        main = _Main(self, self.get(number), rank)
        main.awake = False
        main.scan()
        main.take_results()
        settled = self.ranks.settled(main.rank) or self.variant == "no fence"
        if main.sent < self.config.window and settled:
            main.order_drops()
            main.order_removes()
        if main.sent < self.config.window and self.ranks.settled(main.rank):
            main.order_step()
        if self.variant != "no advance":
            main.flush()
        return main.turned()

    # ------------------------------------------------------------------ the leader's pool

    def pool(self, sight: Sight, reads: Any, claims: int = 0) -> LeaderPool:
        """The product's pool over these tables. To look at, but for ``claims``."""
        copies, cpu_cache, slots, assigned, dead = sight
        members = self.ranks.cpu_cache.look(cpu_cache)
        tables = PoolTables(self.config.slots, members.cpu_cache, self.config.ranks, AdapterTable())
        tables.cpu_cache = members
        tables.slots = self.ranks.slots.look(slots)
        tables.copies = self.ranks.copies.look(copies)
        tables.assigned = set(bits(assigned))
        tables.dead = dict.fromkeys(bits(dead), "dead")
        tables.claims = {rid: members.key_of(rid) for rid in bits(claims)}
        tables.unreadable = lambda key: "unreadable"  # type: ignore[method-assign]
        return self._pool.over(tables, reads)

    @kept
    def over(self, sight: Sight, reads: Any, waiting: int) -> tuple[tuple[int, bool], ...]:
        """Waiting requests that need wait no more, and whether they failed."""
        settled = self.pool(sight, reads).settled(bits(waiting))
        return tuple((rid, isinstance(state, AskFailed)) for rid, state in settled)

    @kept
    def failed_copies(self, copies: int, slots: int) -> tuple[tuple[int, int], ...]:
        """(adapter, fetch number) of copies to be dropped."""
        pool = self.pool((copies, 0, slots, 0, 0), ())
        pool.tables.copies = self.ranks.copies.at(copies)
        return tuple((failed[0], failed[1]) for failed in pool.failed_copies())

    @kept
    def admit(
        self, sight: Sight, reads: Any, claims: int, queue: Any, tried: Any, grew: bool
    ) -> tuple[Any, Any, int, tuple[int, ...], tuple[int, ...]]:
        """One pass of the product's queue: what waits then, what of it was tried, who has claims,
        who joins the step, who failed.
        """
        pool = self.pool(sight, reads, claims)
        admission = AdmissionQueue([pool])
        admission._waiting = list(queue)
        admission._tried = dict(tried)
        admission._marks = [pool.growth_mark() - grew]
        admitted = admission.admit(len(self.config.steps))
        self._check_order(pool, admission._waiting, admitted.rows)
        return (
            tuple(admission._waiting),
            tuple(sorted(admission._tried.items())),
            sum(1 << rid for rid in pool.tables.claims),
            tuple(admitted.rows),
            tuple(rid for rid, _ in admitted.failed),
        )

    def _check_order(self, pool: LeaderPool, waiting: list[int], joined: list[int]) -> None:
        """The oldest that waits for a slot is passed by nobody, and waits only while all are spoken
        for.
        """
        tables = pool.tables
        left = [rid for rid in waiting if pool.request_state(rid) is CopyState.IN]
        if not left:
            return
        if any(rid > left[0] for rid in joined):
            raise ViolationError("oldest first", f"request {left[0]} is passed by {joined}")
        adapters = tables.claimed_adapters()
        if tables.cpu_cache.key_of(left[0]) in adapters or len(adapters) < self.config.slots:
            raise ViolationError(
                "no slot idle", f"request {left[0]} waits for a slot; taken by {sorted(adapters)}"
            )


class _Main:
    """The leader while one transition changes it."""

    def __init__(self, leaders: Leaders, leader: Leader, rank: int) -> None:
        self._leaders = leaders
        self._ranks = leaders.ranks
        self.rank = rank
        (
            self.copies,
            self.waiting,
            self.queue,
            self.tried,
            self.grew,
            self.running,
            self.claims,
            self.ending,
            self.awake,
            self.sent,
            self.results,
            self.uncounted,
            self.waits,
        ) = leader
        self.items: list[Item] = []
        self.failed: list[int] = []

    def turned(self) -> Turned:
        leader = Leader(
            self.copies,
            self.waiting,
            self.queue,
            self.tried,
            self.grew,
            self.running,
            self.claims,
            self.ending,
            self.awake,
            self.sent,
            self.results,
            self.uncounted,
            self.waits,
        )
        number = self._leaders.put(leader)
        self._ranks.check(self.rank)
        return Turned(number, self.rank, tuple(self.items), tuple(self.failed))

    def rank_now(self) -> Rank:
        return self._ranks.get(self.rank)

    def follow(self, done: Done) -> None:
        """The leader's rank has changed: so does its view of the copies."""
        self.rank = done.rank
        for call in done.copies:
            self.copies, _ = self._ranks.copies.do(self.copies, *call)
        self.grew |= done.grew
        assert not done.reports, "the leader reads nothing early"

    def _sight(self) -> tuple[Sight, Any]:
        """What the leader's pool knows its requests' state from, and its own reads, which count in
        some refuted variants only.
        """
        rank = self.rank_now()
        own = self._leaders.variant in ("no agreement", "admit before copies")
        sight = self.copies, rank.cpu_cache, rank.slots, rank.assigned, rank.dead
        return sight, rank.reads if own else ()

    # ------------------------------------------------------------------ phases of a turn

    def scan(self) -> None:
        """Requests whose copies are in everywhere join the queue; those whose read failed end."""
        if not self.waiting:
            return
        for rid, failed in self._leaders.over(*self._sight(), self.waiting):
            self.waiting &= ~(1 << rid)
            if failed:
                self._check_lost(rid)
                self.fail(rid)
            else:
                self.queue = tuple(sorted((*self.queue, rid)))
                self.waits = tuple(sorted((*self.waits, *self._may_wait(rid))))

    def take_results(self) -> None:
        for ran, failed in self.results:
            self.sent -= 1
            for rid in failed:
                if rid not in self.ending:
                    self.fail(rid)
            for rid in ran:
                if rid not in self.ending and self._ranks.ended(self.rank_now(), rid):
                    self.end(rid)
        self.results = ()

    def order_drops(self) -> None:
        ranks = self._ranks
        if not ranks.copies.ask(self.copies, "unannounced"):
            return
        for key, fetch_no in self._leaders.failed_copies(self.copies, self.rank_now().slots):
            self.copies = ranks.copies.do(self.copies, "announce", key)[0]
            self.fenced("a drop")
            self.follow(ranks.drop(self.rank, key, fetch_no))
            self.send("drop", key, fetch_no)

    def order_removes(self) -> None:
        ranks = self._ranks
        for rid in self.ending:
            if self.rank_now().open >> rid & 1:
                if ranks.runs(self.rank, rid):
                    continue
                self.fenced("a remove")
                self.follow(ranks.remove(self.rank, rid))
                self.claims &= ~(1 << rid)
                self.send("remove", rid)
            self.ending = tuple(each for each in self.ending if each != rid)
        if self.rank_now().to_forget:
            self.fenced("a forget")
            self.follow(ranks.forget(self.rank))
            self.send("forget")

    def order_step(self) -> None:
        joined = self.admit() if self.queue else ()
        self.waits = tuple(each for each in self.waits if each[0] in self.queue)
        rows = (*filter(self._goes_on, bits(self.running)), *joined)
        for rid in joined:
            self.running |= 1 << rid
        if rows:
            self._count_waits()
            slots = self.rank_now().slots
            self.send("step", rows)
            self.rank = self._ranks.announce(self.rank, rows, slots)
            self.sent += 1

    def _may_wait(self, rid: int) -> list[tuple[int, int, int]]:
        """How many steps the request may wait, at most: see "Who runs next" in the architecture."""
        config, rank = self._leaders.config, self.rank_now()
        if not config.bound:
            return []
        older = rank.open & ((1 << rid) - 1) & ~(self.running | rank.assigned)
        return [(rid, config.bound * (older.bit_count() // config.slots + 1), 0)]

    def _count_waits(self) -> None:
        """A step goes without those that still wait."""
        waits = [each for each in self.waits if each[0] in self.queue]
        for rid, most, waited in waits:
            if waited == most:
                raise ViolationError("bounded wait", f"request {rid} waits more than {most} steps")
        self.waits = tuple((rid, most, waited + 1) for rid, most, waited in waits)

    def _goes_on(self, rid: int) -> bool:
        """Whether the leader expects the request to run another step."""
        rank = self.rank_now()
        planned = rank.progress[rid] + sum(rid in step.rows for step in rank.steps)
        return not self._leaders.config.by_count or planned < self._leaders.config.steps[rid]

    def admit(self) -> tuple[int, ...]:
        """One pass over the waiting requests."""
        queue = (self.queue, self.tried, self.grew)
        passed = self._leaders.admit(*self._sight(), self.claims, *queue)
        self.queue, self.tried, self.claims, joined, failed = passed
        self.grew = False
        for rid in failed:
            self._check_lost(rid)
            self.fail(rid)
            self.awake = self._leaders.config.wakes
        return joined

    def _check_lost(self, rid: int) -> None:
        """A request whose copy failed may still run on a slot."""
        ranks, rank = self._ranks, self.rank_now()
        key = ranks.cpu_cache.ask(rank.cpu_cache, "key_of", rid)
        if ranks.slots.ask(rank.slots, "resident", key) is not None:
            raise ViolationError("nobody else fails", f"adapter {key} sits in a slot")

    def fail(self, rid: int) -> None:
        self.failed.append(rid)
        self.end(rid)

    def end(self, rid: int) -> None:
        """No further step names the request; its remove follows."""
        if rid not in self.ending:
            self.ending = (*self.ending, rid)
        mask = 1 << rid
        self.waiting &= ~mask
        if rid in self.queue:
            self.queue = tuple(each for each in self.queue if each != rid)
            self.tried = ()
        self.running &= ~mask
        if not self.rank_now().assigned & mask and self.claims & mask:
            self.claims &= ~mask
            self.grew = True

    # ------------------------------------------------------------------ the schedule channel

    def fenced(self, what: str) -> None:
        if not self._ranks.settled(self.rank):
            raise ViolationError("fence", f"{what} lands inside an admit on rank 0")

    def send(self, *entry: Any) -> None:
        self.flush()
        rank = self.rank_now()
        self.items.append((*entry, rank.cpu_cache, rank.slots))

    def flush(self) -> None:
        self.items += self.uncounted
        self.uncounted = ()
