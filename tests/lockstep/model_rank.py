"""One rank of the lockstep model: its main thread's changes to its tables, its step thread.

Every transition is one locked section of the product (``pool``, ``fetches``, ``admit``, ``state``),
so whatever may come between two of them in a process may come between them here. A rank's state is
a tuple, named by a small number; a transition is a function of that number and is computed once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from model_config import FAILED, IN, OTHER, READING, Config, ViolationError, bits, kept
from model_state import (
    AGREED,
    AGREED_AGAIN,
    LAUNCHED,
    RUNS,
    VOTED,
    VOTED_AGAIN,
    WAITS,
    Done,
    Rank,
    Step,
    Work,
)
from model_tables import KeepAll, LooksAtSlots, Table, copy_table, cpu_cache_table, slot_table

from mstar_tp.engine.resources.lora import vote
from mstar_tp.engine.resources.lora.cpu_cache.fetches import EARLY_READS
from mstar_tp.engine.resources.lora.cpu_cache.membership import CacheMembership
from mstar_tp.engine.resources.lora.vote import CopyState, Miss, VoteResult


class Ranks:
    """Transitions of any rank; ``get`` and ``put`` go from numbers to tuples and back."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.variant = config.variant
        self.num_keys = len(config.names) + sum(
            kind == "load" for program in config.programs for kind, _ in program
        )
        kinds = {"keep without prefix": KeepAll, "tier looks at slots": LooksAtSlots}
        self.cpu_cache: Table = cpu_cache_table(
            config.capacity,
            config.costs or (1,) * self.num_keys,
            kinds.get(config.variant or "", CacheMembership),
        )
        self.slots: Table = slot_table(config.slots)
        self.copies: Table = copy_table(config.ranks)
        self.known: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self._ranks: list[Rank] = []
        self._numbers: dict[Rank, int] = {}

    def get(self, number: int) -> Rank:
        return self._ranks[number]

    def put(self, rank: Rank) -> int:
        number = self._numbers.setdefault(rank, len(self._ranks))
        if number == len(self._ranks):
            self._ranks.append(rank)
        return number

    def start(self) -> Done:
        """A rank that serves the configured adapters and holds the first of them."""
        config = self.config
        names = (1 << len(config.names)) - 1
        rank = Rank(
            reads=(None,) * self.num_keys,
            progress=(0,) * len(config.steps),
            served=names,
            files=names,
        )
        work = Work(self, rank)
        for key in range(config.held):
            work.apply(work.cpu_cache("preload", key))
        return work.done()

    # ------------------------------------------------------------------ main thread

    @kept
    def body(self, number: int, body: tuple[Any, ...]) -> Done:
        """Apply a conductor message."""
        work = Work(self, self.get(number))
        kept_before = self.cpu_cache.ask(work.cpu_cache_state, "keep")
        match body:
            case ("new", rid, key):
                work.open |= 1 << rid
                if not work.served >> key & 1:
                    work.dead |= 1 << rid
                else:
                    self._ingest(work, rid, key)
            case ("unload", key):
                if work.served >> key & 1:
                    work.served &= ~(1 << key)
                    work.forget_if_unused(key)
            case ("load", key):
                work.checked |= 1 << key
            case ("commit", key):
                work.checked &= ~(1 << key)
                work.served |= 1 << key
                work.files |= 1 << key
        if self.variant is None and set(work.dropped).intersection(kept_before):
            raise ViolationError("oldest first", f"{body} drops one of {kept_before}, all kept")
        return work.done()

    def _ingest(self, work: Work, rid: int, key: int) -> None:
        read = work.reads[key]
        if self.variant == "tier looks at slots":
            resident = self.slots.ask(work.slots, "resident", key) is not None
            work.apply(work.cpu_cache("ingest_unless", resident, rid, key))
        elif self.variant == "tier when a read lands" and (read is None or read[1] == READING):
            work.unheld += ((rid, key),)
            work.reads[key] = (0, READING)
        elif self.variant == "retry before the failure" and read is not None and read[1] == FAILED:
            fetch_no = self.cpu_cache.ask(work.cpu_cache_state, "cpu_cache.number", key)
            work.apply(work.cpu_cache("drop", key, fetch_no, "unreadable"))
            work.apply(work.cpu_cache("ingest", rid, key))
        else:
            work.apply(work.cpu_cache("ingest", rid, key))

    @kept
    def remove(self, number: int, rid: int) -> Done:
        """Close a request."""
        work = Work(self, self.get(number))
        gone = ~(1 << rid)
        work.open &= gone
        work.assigned &= gone
        work.dead &= gone
        key = self.cpu_cache.ask(work.cpu_cache_state, "key_of", rid)
        work.progress = (*work.progress[:rid], 0, *work.progress[rid + 1 :])
        work.slots = self.slots.do(work.slots, "release", rid)[0]
        work.unheld = tuple(each for each in work.unheld if each[0] != rid)
        if key is not None:
            work.grew = True
            work.apply(work.cpu_cache("remove", rid))
            work.forget_if_unused(key)
        return work.done()

    @kept
    def drop(self, number: int, key: int, fetch_no: int) -> Done:
        """Forget a copy that some rank could not read."""
        work = Work(self, self.get(number))
        work.apply(work.cpu_cache("drop", key, fetch_no, "unreadable"))
        work.grew = True
        return work.done()

    @kept
    def forget(self, number: int) -> Done:
        """Forget the slots of what was unloaded."""
        work = Work(self, self.get(number))
        for key in work.to_forget:
            work.slots = self.slots.do(work.slots, "forget", key)[0]
        work.to_forget = ()
        return work.done()

    @kept
    def early(self, number: int, key: int) -> Done:
        """A body that is not ordered yet names the adapter: maybe start its read."""
        work = Work(self, self.get(number))
        room = self.config.capacity - self.used(number) - work.early_cost()
        known = work.reads[key] is not None or any(each == key for each, _ in work.early)
        fits = self.cost(key) <= room and len(work.early) < EARLY_READS
        if work.files >> key & 1 and not known and fits:
            work.early += ((key, READING),)
        return work.done()

    # ------------------------------------------------------------------ readers

    @kept
    def landings(self, number: int) -> tuple[tuple[bool, int], ...]:
        """Reads under way: (whether it is an early one, adapter)."""
        rank = self.get(number)
        held = ((False, k) for k, read in enumerate(rank.reads) if read and read[1] == READING)
        return (*held, *((True, key) for key, state in rank.early if state == READING))

    @kept
    def land(self, number: int, early: bool, key: int, outcome: str) -> Done:
        """A read ends: its copy, and its report."""
        work = Work(self, self.get(number))
        if early:
            # A failure is forgotten: what is held later reads anew.
            landed = () if outcome == FAILED else ((key, outcome),)
            place = work.early.index((key, READING))
            work.early = (*work.early[:place], *landed, *work.early[place + 1 :])
            return work.done()
        read = work.reads[key]
        assert read is not None
        fetch_no = read[0]
        if self.variant == "tier when a read lands":
            work.reads[key] = None
            for rid, each in work.unheld:
                if each == key:
                    work.apply(work.cpu_cache("ingest", rid, key))
            work.unheld = tuple(each for each in work.unheld if each[1] != key)
            fetch_no = self.cpu_cache.ask(work.cpu_cache_state, "cpu_cache.number", key)
            if fetch_no is None:
                return work.done()
        work.reads[key] = (fetch_no, outcome)
        work.reports.append((key, fetch_no, outcome))
        return work.done()

    # ------------------------------------------------------------------ step thread

    @kept
    def announce(self, number: int, rows: tuple[int, ...], slots: int) -> int:
        """Hand a step to the step thread."""
        rank = self.get(number)
        return self.put(rank._replace(steps=(*rank.steps, Step(rows, slots))))

    @kept
    def begin(self, number: int) -> int:
        """The admit's first locked section: seat residents, pick victims, look at the misses."""
        work = Work(self, self.get(number))
        step = work.steps[0]
        if work.slots != step.slots:
            raise ViolationError("equal tables", "a step begins on another slot table")
        rows = [rid for rid in step.rows if not work.dead >> rid & 1 and not self.ended(work, rid)]
        work.slots = self.slots.do(work.slots, "tick")[0]
        waiting: dict[int, list[int]] = {}
        for rid in rows:
            if work.assigned >> rid & 1:
                continue
            key = self.cpu_cache.ask(work.cpu_cache_state, "key_of", rid)
            if key is None:
                raise ViolationError("one order", f"a step names request {rid}, which is not open")
            slot = self.slots.ask(work.slots, "resident", key)
            if slot is None:
                waiting.setdefault(key, []).append(rid)
            else:
                work.seat(rid, key, slot)
        misses = tuple(
            (key, tuple(rids), None if work.reads[key] is None else work.reads[key][1])
            for key, rids in waiting.items()
        )
        step = step._replace(runs=tuple(rows), misses=misses, slots=0)
        if not misses:
            work.steps[0] = self._settled(work, step)
        elif self.variant == "no agreement":
            work.steps[0] = step._replace(phase=AGREED, victims=self._victims(work), results=())
        else:
            work.steps[0] = step._replace(phase=VOTED, victims=self._victims(work))
        return work.done().rank

    def _victims(self, work: Work) -> tuple[int, ...]:
        victims: tuple[int, ...] = self.slots.ask(work.slots, "victims")
        return victims

    @kept
    def vote(self, number: int, rank: int) -> tuple[int, ...]:
        """What the rank brings into the agreement it has entered."""
        return tuple(vote.cast(0, self._misses(number), self.config.slots, rank))

    @kept
    def agreed(self, number: int, lowest: tuple[int, ...], rank: int) -> int:
        """The agreement is over: the verdict on every miss."""
        work = Work(self, self.get(number))
        step = work.steps[0]
        results = tuple(vote.count(0, self._misses(number), lowest, rank))
        work.steps[0] = step._replace(phase=step.phase + 1, results=results)
        return work.done().rank

    def _misses(self, number: int) -> list[Miss]:
        states = {READING: CopyState.WAITING, IN: CopyState.IN, OTHER: CopyState.IN}
        return [
            Miss(
                key,  # type: ignore[arg-type]  # a number stands for the adapter
                states.get(state or FAILED, CopyState.FAILED),
                state if state in (IN, OTHER) else None,
            )
            for key, _, state in self.get(number).steps[0].misses
        ]

    @kept
    def settle(self, number: int) -> Done:
        """The admit's second locked section: bury what failed, install and seat the others, plan,
        launch. Or go on to wait for reads that the agreement said are under way.
        """
        work = Work(self, self.get(number))
        step = work.steps[0]
        if self.variant == "no agreement":
            own = [VoteResult(miss.state, True) for miss in self._misses(number)]
            step = step._replace(results=tuple(own))
        pairs = list(zip(step.misses, step.results, strict=True))
        for (_, rids, _), verdict in pairs:
            if not verdict.survives:
                step = work.bury(step, rids)
        alive = [(miss, verdict) for miss, verdict in pairs if verdict.survives]
        places = list(zip((miss for miss, _ in alive), step.victims, strict=False))
        if step.phase == AGREED:
            if len(alive) > len(step.victims):
                raise ViolationError(
                    "capacity",
                    f"a step needs {len(alive)} slots and {len(step.victims)} may be taken",
                )
            if any(verdict.state is CopyState.WAITING for _, verdict in alive):
                kept_misses = tuple(miss for miss, _ in alive)
                work.steps[0] = step._replace(
                    phase=WAITS, misses=kept_misses, results=tuple(v for _, v in alive)
                )
                return work.done()
        for (key, rids, state), slot in places:
            if state not in (IN, OTHER):
                raise ViolationError("one order", f"adapter {key} is installed and not in")
            evicted = work.call("install", slot, key)
            work.grew |= evicted is not None
            for rid in rids:
                work.seat(rid, key, slot)
        work.steps[0] = self._settled(work, step)
        return work.done()

    @kept
    def reads_are_over(self, number: int) -> bool:
        """Whether a step that waits for its reads may go on to the second agreement."""
        rank = self.get(number)
        reads = (rank.reads[key] for key, _, _ in rank.steps[0].misses)
        return all(read is None or read[1] != READING for read in reads)

    @kept
    def look_again(self, number: int) -> int:
        """Every read that a step waited for is over: vote once more."""
        work = Work(self, self.get(number))
        step = work.steps[0]
        looks = tuple(
            (key, rids, None if work.reads[key] is None else work.reads[key][1])
            for key, rids, _ in step.misses
        )
        agreed = self.variant == "no agreement"
        work.steps[0] = step._replace(phase=AGREED_AGAIN if agreed else VOTED_AGAIN, misses=looks)
        return work.done().rank

    def _settled(self, work: Work, step: Step) -> Step:
        runs = tuple(rid for rid in step.runs if not work.dead >> rid & 1)
        return Step(
            step.rows,
            0,
            phase=LAUNCHED if runs else RUNS,
            runs=runs,
            failed=step.failed,
            settled=(work.slots, work.dead),
        )

    @kept
    def run(self, number: int) -> int:
        """The forward's collectives are behind this rank."""
        rank = self.get(number)
        head = rank.steps[0]._replace(phase=RUNS, settled=(0, 0))
        return self.put(rank._replace(steps=(head, *rank.steps[1:])))

    @kept
    def finish(self, number: int) -> int:
        """Commit: every row that ran is one step further."""
        rank = self.get(number)
        progress = tuple(
            done + (rid in rank.steps[0].runs) for rid, done in enumerate(rank.progress)
        )
        return self.put(rank._replace(steps=rank.steps[1:], progress=progress))

    def ended(self, rank: Any, rid: int) -> bool:
        """Whether the request has its last token."""
        return bool(rank.progress[rid] >= self.config.steps[rid])

    # ------------------------------------------------------------------ looks

    @kept
    def phase(self, number: int) -> int:
        """Of the step at the head, or -1."""
        steps = self.get(number).steps
        return steps[0].phase if steps else -1

    @kept
    def settled(self, number: int) -> bool:
        """Whether every step sent has settled its admit here."""
        steps = self.get(number).steps
        return not steps or (len(steps) == 1 and steps[0].phase >= LAUNCHED)

    @kept
    def runs(self, number: int, rid: int) -> bool:
        """Whether a step that has not left this rank's device ran the request."""
        steps = self.get(number).steps
        return bool(steps) and steps[0].phase >= LAUNCHED and rid in steps[0].runs

    @kept
    def fetches(self, number: int, key: int) -> int | None:
        """The number of the adapter's hold."""
        fetch_no: int | None = self.cpu_cache.ask(
            self.get(number).cpu_cache, "cpu_cache.number", key
        )
        return fetch_no

    @kept
    def reads(self, number: int, key: int) -> bool:
        """Whether the adapter's copy is being read."""
        read = self.get(number).reads[key]
        return read is not None and read[1] == READING

    def cost(self, key: int) -> int:
        """What the adapter costs in the CPU cache."""
        return self.config.costs[key] if self.config.costs else 1

    @kept
    def used(self, number: int) -> int:
        """What the adapters that the tier holds cost together."""
        return sum(map(self.cost, self.cpu_cache.ask(self.get(number).cpu_cache, "cpu_cache.keys")))

    @kept
    def check(self, number: int) -> None:
        """The tier is within its bound and holds for the oldest.

        Raises:
            ViolationError: it does not.
        """
        rank, bound = self.get(number), self.config.capacity
        held = self.cpu_cache.ask(rank.cpu_cache, "cpu_cache.keys")
        copies = [key for key, read in enumerate(rank.reads) if read is not None]
        early = [key for key, _ in rank.early]
        if max(self.used(number), sum(map(self.cost, copies + early))) > bound:
            raise ViolationError("capacity", f"holds {held}, copies {copies}, early {early}")
        live: list[int] = []
        for rid in bits(rank.open):
            key = self.cpu_cache.ask(rank.cpu_cache, "key_of", rid)
            failed_cause = self.cpu_cache.ask(rank.cpu_cache, "failed_cause", rid) is not None
            if key is not None and key not in live and not failed_cause:
                live.append(key)
        while sum(map(self.cost, live)) > bound:
            live.pop()
        if not set(live) <= set(held):
            raise ViolationError(
                "oldest first", f"live requests name {live}, those held are {held}"
            )
