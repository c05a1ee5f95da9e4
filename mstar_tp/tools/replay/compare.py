"""The first difference of two recordings: another rank's of the same run, or another run's.

Both are replayed side by side. At each step the schedule since the last one is compared, then each
table as the rank itself hashed it, then what was agreed and how the step ended. The time at which a
rank heard of copies is its own affair. A rank that was killed may lack its last milliseconds: where
one lacks the end of a step, both go on with the other's; where one lacks a step that the other
found itself split from the leader in, the leader's word stands in that step.
"""

from __future__ import annotations

import msgspec

from mstar_tp.common.errors import RecordingError
from mstar_tp.engine.checks import TABLES
from mstar_tp.tools.replay.replayer import Replayed, Replayer
from mstar_tp.tools.replay.script import OrderedEntry, Script
from mstar_tp.wire.schedule import Step

ALIKE = ("world_size", "epoch", "num_pages", "page_size", "prefix_caching", "lora")
"""The settings that two comparable recordings start with alike; configurations may differ."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One recording's side of a difference."""

    path: str
    rank: int
    rows: tuple[str, ...]
    note: str | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference. ``table``: one of the tables, or order, agreement or outcome."""

    step: int
    table: str
    sides: tuple[Side, Side]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``steps``: how many were found alike; ``note``: what could not be compared."""

    steps: int
    difference: Difference | None
    note: str | None


class _Replay:
    """One of the two, and the step it stands at."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._replayer = Replayer(script)
        self.at: Replayed | None = None

    def advance(self) -> None:
        self.at = self._replayer.advance()

    def run(self, replayed: Replayed | None) -> None:
        """Go past the step, with an end that either has, or with none."""
        if replayed is None:
            self._replayer.skip()
        else:
            self._replayer.run(replayed)

    @property
    def since(self) -> tuple[str, ...]:
        """The entries applied since the last step, and the step."""
        step = () if self.at is None else (self.at.step,)
        return tuple(describe(entry) for entry in (*self._replayer.since, *step))

    def side(self, rows: tuple[str, ...], note: str | None = None) -> Side:
        recording = self.script.recording
        return Side(path=str(recording.path), rank=recording.start.rank, rows=rows, note=note)

    def table_side(self, table: str) -> Side:
        """The table as the rank had it: as it said itself, else as the order makes it."""
        at = self.at
        if at is None or table not in at.recorded:
            return self.side((), "not in this recording, which ends before")
        rows = tuple(map(str, self._replayer.state.table_rows(table)))
        if at.rebuilt.get(table, at.recorded[table]) == at.recorded[table]:
            return self.side(rows)
        dumps = self.script.dumps[at.step.tp_seq]
        dump = next((d.rows for d in dumps if d.table == table), None)
        if dump is None:
            return self.side(rows, "as the order makes it; the rank had it otherwise")
        return self.side(dump, "as the rank had it; the order makes it otherwise")


_Pair = tuple[_Replay, _Replay]


def compare(a: Script, b: Script) -> Comparison:
    """The first step and table in which two recordings differ.

    Raises:
        RecordingError: they are not of instances alike, or one contradicts itself.
    """
    _check_starts(a, b)
    pair = (_Replay(a), _Replay(b))
    count = 0
    while True:
        for replay in pair:
            replay.advance()
        steps = [replay.at for replay in pair if replay.at is not None]
        difference = _difference(pair, count)
        ended = next((step for step in steps if step.ran is not None), None)
        if difference is not None or len(steps) < len(pair):
            return Comparison(steps=count, difference=difference, note=_note(pair))
        for replay in pair:
            replay.run(ended)
        count += ended is not None


def _difference(pair: _Pair, count: int) -> Difference | None:
    steps = [replay.at for replay in pair]
    step = min((each.step.tp_seq for each in steps if each is not None), default=count)
    found = _order(pair) or _tables(pair) or _outcome(pair)
    if found is None:
        return None
    table, sides = found
    return Difference(step=step, table=table, sides=sides)


_Found = tuple[str, tuple[Side, Side]]


def _order(pair: _Pair) -> _Found | None:
    a, b = pair
    orders = a.since, b.since
    length = None if a.at and b.at else min(map(len, orders))
    if orders[0][:length] == orders[1][:length]:
        return None
    return "order", (a.side(orders[0]), b.side(orders[1]))


def _tables(pair: _Pair) -> _Found | None:
    a, b = pair
    for table in TABLES:
        hashes = [replay.at.recorded.get(table) for replay in pair if replay.at is not None]
        hashes = [value for value in hashes if value is not None]
        if len(hashes) < len(pair):
            # The other rank's word is missing; the leader's is in the step.
            hashes += [getattr(r.at.step.checks, table) for r in pair if r.at is not None][:1]
        if len(hashes) == len(pair) and hashes[0] != hashes[1]:
            return table, (a.table_side(table), b.table_side(table))
    return None


def _outcome(pair: _Pair) -> _Found | None:
    a, b = pair
    if a.at is None or b.at is None or a.at.ran is None or b.at.ran is None:
        return None
    if a.at.agreed != b.at.agreed:
        rows = [tuple(str(list(values)) for values in r.at.agreed) for r in pair if r.at]
        return "agreement", (a.side(rows[0]), b.side(rows[1]))
    if a.at.ran != b.at.ran:
        return "outcome", (a.side((str(a.at.ran),)), b.side((str(b.at.ran),)))
    return None


def _note(pair: _Pair) -> str | None:
    """A note on why the two could not be compared to the end of both."""
    cut = [replay for replay in pair if replay.script.recording.note is not None]
    counts = {replay.script.num_steps for replay in pair}
    if not cut and len(counts) == 1:
        return None
    notes = (
        f"{replay.script.recording.path} ends after {replay.script.num_steps} steps: "
        f"{replay.script.recording.note or 'it is whole'}"
        for replay in pair
    )
    return "; ".join(notes)


def _check_starts(a: Script, b: Script) -> None:
    for field in ALIKE:
        got = [getattr(script.recording.start, field) for script in (a, b)]
        if got[0] != got[1]:
            raise RecordingError(
                f"{a.recording.path} and {b.recording.path} cannot be compared: {field} is "
                f"{got[0]} in one and {got[1]} in the other"
            )


def describe(entry: OrderedEntry) -> str:
    """One ordered entry for a person; equal for entries that decide alike (a path decides nothing:
    each rank may find its files elsewhere).
    """
    if isinstance(entry, Step):
        rows = " ".join(f"{rid}:{count}" for rid, count in entry.rows)
        return f"Step {entry.tp_seq} after {entry.planned_after}: {rows}"
    fields = (f"{f}={getattr(entry, f)}" for f in entry.__struct_fields__ if f != "path")
    return " ".join((type(entry).__name__, *fields))
