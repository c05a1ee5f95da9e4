"""The product's own tables as interned states: what the lockstep model decides with.

A table's state is a small number. ``Table.do(state, method, ...)`` makes the product's class, plays
the calls that led to that state, makes one more, and names the state that results; answers are
remembered, so exploring costs a dictionary look-up. Adapters are small numbers here: the tables ask
of a key no more than to be hashed and ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.engine.resources.lora.cpu_cache.membership import CacheMembership, Changes, CpuCache
from mstar_tp.engine.resources.lora.rank_copies import CopyTable
from mstar_tp.engine.resources.lora.slots import SlotTable
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.states import FailedRead

Call = tuple[Any, ...]
Answer = Any


class Table:
    """Every state of one table that was met, by number; 0 is the empty table."""

    def __init__(self, make: Callable[[], Any], shape: Callable[[Any, tuple[Call, ...]], Hashable]):
        """``shape`` says what two states must have in common to be one."""
        self._make = make
        self._shape = shape
        self._calls: list[tuple[Call, ...]] = [()]
        self._states: dict[Hashable, int] = {shape(make(), ()): 0}
        self._known: dict[tuple[Any, ...], tuple[int, Answer]] = {}
        self._shown: dict[int, Any] = {}

    def do(self, state: int, *call: Any) -> tuple[int, Answer]:
        """The state and the answer of one more call (method, arguments). A dotted method is that of
        a part.
        """
        known = self._known.get((state, call))
        if known is None:
            table = self.at(state)
            answer = _plain(attrgetter(call[0])(table)(*call[1:]))
            calls = (*self._calls[state], call)
            shape = self._shape(table, calls)
            after = self._states.get(shape)
            if after is None:
                after = self._states[shape] = len(self._calls)
                self._calls.append(calls)
            known = self._known[state, call] = after, answer
        return known

    def ask(self, state: int, *call: Any) -> Answer:
        """The answer of a call that changes nothing."""
        return self.do(state, *call)[1]

    def look(self, state: int) -> Any:
        """The table in that state, to look at only."""
        table = self._shown.get(state)
        if table is None:
            table = self._shown[state] = self.at(state)
        return table

    def at(self, state: int) -> Any:
        """A table of the caller's own in that state."""
        table = self._make()
        for name, *arguments in self._calls[state]:
            attrgetter(name)(table)(*arguments)
        return table

    def calls(self, state: int) -> tuple[Call, ...]:
        """Calls that lead there from the empty table."""
        return self._calls[state]


def _plain(answer: Answer) -> Answer:
    """An answer that can be kept and shared."""
    if isinstance(answer, Changes):
        return tuple(answer.new), tuple(answer.dropped)
    return tuple(answer) if isinstance(answer, list) else answer


def frozen(value: Any, ordered: bool = True) -> Hashable:
    """All that an object of ours decides by: what it holds, but for the hash of its history, what
    it remembers for an operator, and functions. ``ordered``: the order in which a mapping was
    filled counts.
    """
    if isinstance(value, HistoryHash | FailedRead) or callable(value):
        return None
    if value is None or isinstance(value, int | str | bool | Enum):
        return value
    if isinstance(value, Mapping):
        items = ((frozen(key, ordered), frozen(each, ordered)) for key, each in value.items())
        return tuple(items) if ordered else frozenset(items)
    if isinstance(value, list | tuple):
        return tuple(frozen(each, ordered) for each in value)
    if isinstance(value, set | frozenset):
        return frozenset(frozen(each, ordered) for each in value)
    if is_dataclass(value):
        return tuple(frozen(getattr(value, field.name), ordered) for field in fields(value))
    return tuple((name, frozen(each, ordered)) for name, each in sorted(vars(value).items()))


def cpu_cache_table(
    capacity: int, costs: tuple[int, ...], kind: type[CacheMembership] = CacheMembership
) -> Table:
    """What a CPU cache holds, and for whom; ``costs`` by adapter."""

    def make() -> CacheMembership:
        return kind(CpuCache(capacity, lambda key: costs[key]))  # type: ignore[call-overload]

    return Table(make, lambda table, _: frozen(table))


def slot_table(num_slots: int) -> Table:
    """Which adapter sits where. The clock counts only where it orders: since the last tick."""

    def shape(table: SlotTable, calls: tuple[Call, ...]) -> Hashable:
        touched: set[Hashable] = set()
        for call in reversed(calls):
            if call[0] == "tick":
                break
            if call[0] in ("release", "install"):
                touched.add(call[:2])
        else:
            touched.add("all")
        return tuple(table.rows()), tuple(table.victims()), frozenset(touched)

    return Table(lambda: SlotTable(num_slots), shape)


class Adapter(int):
    """A number with a name, for a table's messages."""

    @property
    def name(self) -> str:
        return f"adapter {int(self)}"


class Copies(CopyTable):
    """The leader's view of all copies, told by plain numbers; ``good`` weights are the file's."""

    def tell(self, rank: int, key: int, fetch_no: int, outcome: str) -> bool:
        """A report: "in", "other" (weights that no other rank has) or "failed"."""
        failed = outcome == "failed"
        report = CopyIn(
            rank=rank,
            key=Adapter(key),  # type: ignore[arg-type]
            fetch_no=fetch_no,
            digest=None if failed else f"{outcome} {rank if outcome == 'other' else ''}",
            cause="the file is gone" if failed else None,
        )
        return self.report(report)


def copy_table(world_size: int) -> Table:
    """In whatever order good reports come, they are one state; after a failure none counts."""

    def shape(table: Copies, _: tuple[Call, ...]) -> Hashable:
        failed = tuple(failure[0] for failure in table.unannounced())
        for copies in table._copies.values():
            if copies.failure is not None:
                copies.digests.clear()
        return failed, frozen(table._copies, ordered=False), frozenset(table._agreed.items())

    return Table(lambda: Copies(world_size), shape)


# ------------------------------------------------------------- refuted ways to keep a CPU cache


class KeepAll(CacheMembership):
    """Keeps what every live request names, not the longest prefix that fits."""

    def _extend_kept(self) -> None:
        for _, key in self._order:
            self._kept[key] = None

    def _fetch(self, key: Any, keep: Any, changes: Changes) -> None:
        if (
            key in self.cpu_cache
            or self.cpu_cache.cost_of(key) <= self.cpu_cache.free
            or not self._all_kept()
        ):
            super()._fetch(key, keep, changes)

    def _all_kept(self) -> bool:
        return all(key in self._kept for key in self.cpu_cache.keys())


class LooksAtSlots(CacheMembership):
    """Asks the slot table: an adapter that sits in a slot needs no copy."""

    _resident = False

    def ingest_unless(self, resident: bool, rid: int, key: Any) -> Changes:
        self._resident = resident
        try:
            return self.ingest(rid, key)
        finally:
            self._resident = False

    def keeps(self, key: Any) -> bool:
        return not self._resident and super().keeps(key)
