"""The results of a benchmark: tables of figures, with the machine, the versions and the command.

Plain data, no torch. ``show`` prints tables that read on a screen and paste into a Markdown page;
``write_json`` keeps every figure unrounded.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float | bool | None
WIDE = 240
"""Columns of output that no terminal takes: whole tables for a file or a pipe."""


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows under named columns; a name says its unit (``us``, ``GB/s``). Notes stand below."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """One row, a cell a column."""
        assert len(cells) == len(self.columns), f"{self.title}: {cells} under {self.columns}"
        self.rows.append(cells)

    def as_dicts(self) -> list[dict[str, Cell]]:
        """Each row by its columns' names."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(slots=True, kw_only=True)
class Report:
    """All that one command found. ``machine`` and ``versions``: see ``bench.machine``."""

    part: str
    command: str
    machine: Mapping[str, Cell]
    versions: Mapping[str, str]
    tables: list[Table] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    """The part that only the JSON holds: every run's own figures."""
    failed: int = 0
    """The number of failures while measuring; with one the command's exit code is 1."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = asdict(self)
        plain["tables"] = [
            {"title": table.title, "rows": table.as_dicts(), "notes": table.notes}
            for table in self.tables
        ]
        return plain


def show(report: Report, console: Console | None = None) -> None:
    """Print the header and every table to stdout."""
    if console is None:
        console = Console(highlight=False, soft_wrap=True)
        if not sys.stdout.isatty():
            console.width = WIDE
    console.print(report.command, markup=False)
    console.print(", ".join(f"{k} {cell(v)}" for k, v in report.machine.items()), markup=False)
    console.print(", ".join(f"{k} {v}" for k, v in report.versions.items()), markup=False)
    for table in report.tables:
        console.print()
        console.print(table.title, style="bold", markup=False)
        console.print(_drawn(table))
        for note in table.notes:
            console.print(note, markup=False)


def write_json(report: Report, path: Path) -> None:
    """Write all of it; raises OSError where ``path`` cannot be written."""
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")


def cell(value: Cell) -> str:
    """A figure as a person reads it: four digits that count; ``-`` for none."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            if math.isnan(value):
                return "-"
            size = abs(value)
            if size >= 1000:
                return f"{value:,.0f}"
            digits = 1 if size >= 100 else 2 if size >= 1 else 3 if size >= 0.1 else 4
            return f"{value:.{digits}f}"
        case int():
            return f"{value:,}"
        case _:
            return value


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median of ``ours`` over the median of ``theirs``; None where either has none."""
    if not ours or not theirs or not median(theirs):
        return None
    return median(ours) / median(theirs)


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(box=box.MARKDOWN)
    for at, name in enumerate(table.columns):
        words = any(isinstance(row[at], str) for row in table.rows)
        drawn.add_column(name, justify="left" if words else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(cell(value) for value in row))
    return drawn
