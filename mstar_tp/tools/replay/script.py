"""A recording put in order: what the main thread applied, and by step what the step thread met."""

from __future__ import annotations

from collections import defaultdict, deque

from mstar_tp.recording.entries import (
    Agreed,
    Charged,
    Checked,
    Entry,
    Opened,
    OverCapacity,
    PagesNamed,
    Ran,
    RecordedCommand,
    TableDump,
    Untouched,
)
from mstar_tp.recording.reader import Recording
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import ScheduleEntry, Step
from mstar_tp.wire.values import AdapterKey

OrderedEntry = RecordedCommand | ScheduleEntry
"""An entry that every rank applies alike, in the one order."""


class Script:
    """The entries of a recording.

    ``ordered`` holds the main thread's entries in the order it applied them; copies, which each
    rank hears of in its own order, stand among the leader's alone.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ordered: list[OrderedEntry | CopyIn] = []
        self.agreed: defaultdict[int, deque[tuple[int, ...]]] = defaultdict(deque)
        self.ran: dict[int, Ran] = {}
        self.dumps: defaultdict[int, list[TableDump]] = defaultdict(list)
        self.costs: defaultdict[int, dict[AdapterKey, int]] = defaultdict(dict)
        """The cost of an adapter, by stage, as are the three tables below."""
        self.untouched: defaultdict[int, set[AdapterKey]] = defaultdict(set)
        """The adapters that change nothing there."""
        self.over_capacity: defaultdict[int, set[AdapterKey]] = defaultdict(set)
        """The adapters that did not fit the memory budget."""
        self.copies: defaultdict[int, dict[tuple[AdapterKey, int], CopyIn]] = defaultdict(dict)
        """The results of this rank's own reads, by adapter and fetch number."""
        self.named: defaultdict[int, list[PagesNamed]] = defaultdict(list)
        """The names of each request's pages, in the order that they got them."""
        self._hashes: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for timed in recording.entries:
            self._sort(timed.entry)

    @property
    def num_steps(self) -> int:
        return sum(isinstance(entry, Step) for entry in self.ordered)

    @property
    def num_requests(self) -> int:
        return sum(isinstance(entry, Opened) for entry in self.ordered)

    def hashes(self, step: Step) -> dict[str, int]:
        """This rank's own hashes as of ``step``, as far as it computed them before it ended."""
        mine = self._hashes[step.tp_seq]
        if self.recording.start.rank == 0:
            # The leader's hashes are what its step carries.
            checks = step.checks
            return {table: getattr(checks, table) for table in checks.__struct_fields__} | mine
        return mine

    def _sort(self, entry: Entry) -> None:
        match entry:
            case PagesNamed():
                self.named[entry.rid].append(entry)
            case Agreed():
                self.agreed[entry.tp_seq].append(entry.values)
            case Ran():
                self.ran[entry.tp_seq] = entry
            case Checked():
                self._hashes[entry.tp_seq] |= entry.hashes
            case TableDump():
                self.dumps[entry.tp_seq].append(entry)
            case Charged():
                self.costs[entry.stage][entry.key] = entry.cost
            case Untouched():
                self.untouched[entry.stage].add(entry.key)
            case OverCapacity():
                self.over_capacity[entry.stage].add(entry.key)
            case CopyIn():
                if entry.rank == self.recording.start.rank:
                    self.copies[entry.stage][entry.key, entry.fetch_no] = entry
                if self.recording.start.rank == 0:
                    self.ordered.append(entry)
            case _:
                assert not hasattr(entry, "format") and not hasattr(entry, "lost")
                self.ordered.append(entry)  # type: ignore[arg-type]  # starts and gaps are read off
