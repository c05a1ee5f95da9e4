"""A rank of the lockstep model as data, and the changes that one transition makes to it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from model_config import IN, OTHER, READING, Config, ViolationError
from model_tables import Table

from mstar_tp.engine.resources.lora.vote import VoteResult

QUEUED, VOTED, AGREED, WAITS, VOTED_AGAIN, AGREED_AGAIN, LAUNCHED, RUNS = range(8)
"""How far a step is on one rank."""


class Step(NamedTuple):
    """A step on one rank. ``rows`` are the leader's; ``runs`` those that go on after the admit."""

    rows: tuple[int, ...]
    slots: int
    """The leader's slot table when it sent the step (R8)."""
    phase: int = QUEUED
    runs: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    misses: tuple[tuple[int, tuple[int, ...], str | None], ...] = ()
    """(adapter, its rows, how far this rank's copy was) in row order"""
    victims: tuple[int, ...] = ()
    results: tuple[VoteResult, ...] = ()
    settled: tuple[int, int] = (0, 0)
    """The slot table and the dead rows when the admit was over."""


class Rank(NamedTuple):
    """Sets of requests and of adapters are bit masks."""

    cpu_cache: int = 0
    reads: tuple[tuple[int, str] | None, ...] = ()
    early: tuple[tuple[int, str], ...] = ()
    slots: int = 0
    open: int = 0
    assigned: int = 0
    dead: int = 0
    checked: int = 0
    served: int = 0
    files: int = 0
    to_forget: tuple[int, ...] = ()
    progress: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    ahead: int = 0
    """Requests whose remove was applied before its place (a refuted variant)."""
    unheld: tuple[tuple[int, int], ...] = ()
    """(request, adapter) whose hold waits for a read (a refuted variant)."""


class Done(NamedTuple):
    """What a transition did: the rank after it; reports and copy table calls that follow from it;
    what the tier dropped; whether a waiting row should be tried again.
    """

    rank: int
    reports: tuple[tuple[int, int, str], ...] = ()
    copies: tuple[tuple[Any, ...], ...] = ()
    dropped: tuple[int, ...] = ()
    grew: bool = False


class Owner(Protocol):
    """Who knows the tables and numbers the states: ``model_rank.Ranks``."""

    config: Config
    variant: str | None
    cpu_cache: Table
    slots: Table

    def put(self, rank: Rank) -> int: ...
    def cost(self, key: int) -> int: ...


class Work:
    """A rank while one transition changes it."""

    def __init__(self, ranks: Owner, rank: Rank) -> None:
        self._ranks = ranks
        self._rank = rank
        self.cpu_cache_state = rank.cpu_cache
        self.reads = list(rank.reads)
        self.early = rank.early
        self.slots = rank.slots
        self.open = rank.open
        self.assigned = rank.assigned
        self.dead = rank.dead
        self.checked = rank.checked
        self.served = rank.served
        self.files = rank.files
        self.to_forget = rank.to_forget
        self.progress = rank.progress
        self.steps = list(rank.steps)
        self.ahead = rank.ahead
        self.unheld = rank.unheld
        self.reports: list[tuple[int, int, str]] = []
        self.copies: list[tuple[Any, ...]] = []
        self.dropped: tuple[int, ...] = ()
        self.grew = False

    def done(self) -> Done:
        rank = Rank(
            self.cpu_cache_state,
            tuple(self.reads),
            self.early,
            self.slots,
            self.open,
            self.assigned,
            self.dead,
            self.checked,
            self.served,
            self.files,
            self.to_forget,
            self.progress,
            tuple(self.steps),
            self.ahead,
            self.unheld,
        )
        number = self._ranks.put(rank)
        return Done(number, tuple(self.reports), tuple(self.copies), self.dropped, self.grew)

    def cpu_cache(self, *call: Any) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """A call that may change what is held: what is new, and what was dropped."""
        self.cpu_cache_state, changes = _sound(self._ranks.cpu_cache, self.cpu_cache_state, *call)
        new, dropped = changes
        return new, dropped

    def call(self, *call: Any) -> Any:
        """A call of the slot table."""
        self.slots, answer = _sound(self._ranks.slots, self.slots, *call)
        return answer

    def apply(self, changes: tuple[tuple[tuple[int, int], ...], tuple[int, ...]]) -> None:
        """Make the copies follow what is held, as the product's ``FetchTracker.apply`` does."""
        new, dropped = changes
        for key in dropped:
            self.dropped += (key,)
            self.reads[key] = None
            self.copies.append(("close", key))
        for key, fetch_no in new:
            self.copies.append(("open", key, fetch_no))
            early = next((state for each, state in self.early if each == key), None)
            self.early = tuple(each for each in self.early if each[0] != key)
            self.reads[key] = (fetch_no, READING)
            if early in (IN, OTHER):
                self.reads[key] = (fetch_no, early)
                self.reports.append((key, fetch_no, early))
        held = self._ranks.cpu_cache.ask(self.cpu_cache_state, "cpu_cache.keys")
        room = self._ranks.config.capacity - sum(map(self._ranks.cost, held))
        while self.early and self.early_cost() > room:
            self.early = self.early[1:]

    def early_cost(self) -> int:
        return sum(self._ranks.cost(key) for key, _ in self.early)

    def forget_if_unused(self, key: int) -> None:
        """As the product's pool: an unloaded adapter that no live request names."""
        retiring = self.files >> key & 1 and not self.served >> key & 1
        if not retiring or self._ranks.cpu_cache.ask(self.cpu_cache_state, "named", key):
            return
        self.apply(self.cpu_cache("forget", key))
        self.early = tuple(each for each in self.early if each[0] != key)
        self.copies.append(("forget", key))
        self.files &= ~(1 << key)
        if self._ranks.variant == "unload unfenced":
            self.call("forget", key)
            if any(QUEUED < step.phase < LAUNCHED for step in self.steps):
                raise ViolationError("fence", f"adapter {key} is forgotten inside an admit")
        else:
            self.to_forget += (key,)

    def seat(self, rid: int, key: int, slot: int) -> None:
        self.call("take", rid, slot)
        self.assigned |= 1 << rid

    def bury(self, step: Step, rids: tuple[int, ...]) -> Step:
        for rid in rids:
            self.dead |= 1 << rid
        return step._replace(failed=(*step.failed, *rids))


def _sound(table: Table, state: int, *call: Any) -> tuple[int, Any]:
    """A call in which the table finds itself in order.

    Raises:
        ViolationError: it does not.
    """
    try:
        return table.do(state, *call)
    except AssertionError as error:
        raise ViolationError("sound tables", f"{call[0]}: {error}") from error
