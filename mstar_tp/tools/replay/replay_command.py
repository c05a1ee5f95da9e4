"""``mstar-tp replay``: what a recording says, for a person or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mstar_tp.common.errors import RecordingError
from mstar_tp.common.units import counted
from mstar_tp.engine.table_rows import Row
from mstar_tp.recording.entries import LoraSizes, Start
from mstar_tp.recording.reader import find_recording, read_recording
from mstar_tp.tools.replay.compare import Comparison, Side, compare, describe
from mstar_tp.tools.replay.replayer import Replayed, Replayer
from mstar_tp.tools.replay.script import Script

MEANINGS = {
    "cpu_cache": "adapters held in host memory, as name#generation, least recent first",
    "served": "adapters that requests may name",
    "slots": "the adapter in each slot of the device, and which requests hold it",
    "pages": "pages of the KV cache, by request",
    "tokens": "how far each request is",
}
"""Tables in words, for a person. The number behind one is its hash, which ranks compare."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the rank that is not what the schedule makes of it.

    A table that cannot be rebuilt is compared with the leader's.
    """

    step: int
    table: str
    wanted: str
    """The value that the table should have had."""
    rebuilt: tuple[str, ...]
    own: tuple[str, ...] | None
    """The rank's own table; None unless it ended with this step."""


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what came before it, the tables as it began, and as it ended."""

    step: int
    since: tuple[str, ...]
    copies: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]
    agreed: tuple[tuple[int, ...], ...]
    failed: tuple[int, ...]
    ended: tuple[int, ...]
    refused: bool
    hashes: dict[str, int]
    before: dict[str, tuple[Row, ...]]
    after: dict[str, tuple[Row, ...]] | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The command's result: ``view`` with --step, ``tables`` (as of the end) without."""

    path: str
    start: Start
    note: str | None
    num_steps: int
    num_requests: int
    departure: Drain | None
    view: StepView | None
    tables: dict[str, tuple[Row, ...]] | None
    comparison: Comparison | None


def replay(file: str, *, step: int | None, other: str | None, as_json: bool) -> int:
    """Print a recording's contents or the difference of two; the exit code.

    It is 1 when two recordings differ, or the rank's own tables were not what the schedule makes of
    them, else 0.

    Raises:
        RecordingError: a recording cannot be read or replayed, or has no such step.
    """
    report = build_report(Path(file), step, None if other is None else Path(other))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(_lines(report)))
    differs = report.comparison is not None and report.comparison.difference is not None
    return 1 if differs or report.departure is not None else 0


def build_report(file: Path, step: int | None, other: Path | None) -> Report:
    """Read and replay what the arguments name. Raises RecordingError."""
    script = Script(read_recording(find_recording(file)))
    replayer = Replayer(script)
    departure, view, tables = None, None, None
    while departure is None and (replayed := replayer.advance()) is not None:
        before = replayer.rows() if replayed.step.tp_seq == step else None
        if (table := replayed.departed or replayed.split) is not None:
            departure = _departure(replayer, replayed, table)
        elif replayed.ran is not None and tables is None:
            replayer.run(replayed)
        else:
            tables = tables or replayer.rows()
            replayer.skip()
        if before is not None:
            after = replayer.rows() if departure is None and replayed.ran is not None else None
            view = _view(replayed, before, after)
            break
    if step is not None and view is None:
        raise RecordingError(_no_step(script, step, departure))
    comparison = None
    if other is not None:
        comparison = compare(script, Script(read_recording(find_recording(other))))
    recording = script.recording
    return Report(
        path=str(recording.path),
        start=recording.start,
        note=recording.note,
        num_steps=script.num_steps,
        num_requests=script.num_requests,
        departure=departure,
        view=view,
        tables=None if view is not None else tables or replayer.rows(),
        comparison=comparison,
    )


def _no_step(script: Script, step: int, departure: Drain | None) -> str:
    where = f"{script.recording.path}: step {step} cannot be rebuilt: "
    if departure is not None:
        return where + (
            f"at step {departure.step} the rank's table of {departure.table} was not "
            f"{departure.wanted}"
        )
    return where + f"the recording holds {script.num_steps} steps, numbered from 0"


def _departure(replayer: Replayer, replayed: Replayed, table: str) -> Drain:
    tp_seq = replayed.step.tp_seq
    dumps = replayer.script.dumps[tp_seq]
    return Drain(
        step=tp_seq,
        table=table,
        wanted="the leader's" if replayed.departed is None else "what the order makes of it",
        rebuilt=tuple(map(str, replayer.state.table_rows(table))),
        own=next((dump.rows for dump in dumps if dump.table == table), None),
    )


def _view(
    replayed: Replayed,
    before: dict[str, tuple[Row, ...]],
    after: dict[str, tuple[Row, ...]] | None,
) -> StepView:
    ran = replayed.ran
    return StepView(
        step=replayed.step.tp_seq,
        since=tuple(map(describe, replayed.since)),
        copies=tuple(
            f"{copy.key} hold {copy.fetch_no} on rank {copy.rank}: "
            + (f"in, digest {copy.digest}" if copy.cause is None else f"failed: {copy.cause}")
            for copy in replayed.copies
        ),
        rows=replayed.step.rows,
        agreed=replayed.agreed,
        failed=ran.failed if ran else (),
        ended=ran.ended if ran else (),
        refused=ran is not None and ran.refused,
        hashes=replayed.recorded,
        before=before,
        after=after,
    )


# ---------------------------------------------------------------------- for a person


def _lines(report: Report) -> Iterable[str]:
    start = report.start
    sizes = "; ".join(map(_sizes, start.lora)) or "no adapters"
    yield f"{report.path}: rank {start.rank} of {start.world_size}, mstar_tp {start.version}"
    yield f"  {sizes}, {counted(start.num_pages, 'page')}"
    yield f"  {counted(report.num_steps, 'step')}, {counted(report.num_requests, 'request')}"
    yield f"  {report.note or 'whole: the rank ended and closed it'}"
    if report.view is not None:
        yield from _view_lines(report.view)
    if report.departure is not None:
        yield from _drain_lines(report.departure)
    # Beside a comparison only the first difference counts, and there may be thousands of pages.
    if report.tables is not None and (report.departure or report.comparison is None):
        yield "tables as the recording ends" if report.departure is None else "rebuilt tables there"
        yield from _table_lines(report.tables)
    if report.comparison is not None:
        yield from _comparison_lines(report.comparison)


def _sizes(lora: LoraSizes) -> str:
    stage = f"{lora.stage}: " if lora.stage else ""
    return f"{stage}{counted(lora.slots, 'slot')}, CPU cache of {lora.cpu_capacity} {lora.cpu_unit}"


def _view_lines(view: StepView) -> Iterable[str]:
    yield f"applied since step {view.step - 1}"
    yield from _indented(view.since)
    if view.copies:
        yield "copies reported since"
        yield from _indented(view.copies)
    yield f"tables as step {view.step} begins"
    yield from _table_lines(view.before, view.hashes)
    rows = " ".join(f"{rid}:{count}" for rid, count in view.rows)
    yield f"step {view.step}, as request:tokens: {rows}"
    for values in view.agreed:
        yield f"  agreed by all ranks {list(values)}"
    if view.refused:
        yield "  refused"
    if view.failed:
        yield "  requests that failed " + " ".join(map(str, view.failed))
    if view.ended:
        yield "  requests that ended " + " ".join(map(str, view.ended))
    if view.after is None:
        yield "  its end is not rebuilt"
    else:
        yield f"tables as step {view.step} ends"
        yield from _table_lines(view.after)


def _table_lines(
    tables: dict[str, tuple[Row, ...]], hashes: dict[str, int] | None = None
) -> Iterable[str]:
    for table, rows in tables.items():
        value = (hashes or {}).get(table)
        yield f"  {table}: {MEANINGS[table]}" + ("" if value is None else f" ({value:#x})")
        yield from _indented(map(str, rows), "    ")


def _drain_lines(departure: Drain) -> Iterable[str]:
    yield f"step {departure.step}: the rank's table of {departure.table} is not {departure.wanted}"
    yield "  as the order makes it"
    yield from _indented(departure.rebuilt, "    ")
    if departure.own is None:
        yield "  as the rank had it: only its hash was recorded"
    else:
        yield "  as the rank had it"
        yield from _indented(departure.own, "    ")


def _comparison_lines(comparison: Comparison) -> Iterable[str]:
    difference = comparison.difference
    if comparison.note is not None:
        yield f"compared as far as both go: {comparison.note}"
    if difference is None:
        yield f"the two recordings are the same: {comparison.steps} steps"
        return
    yield f"first difference: step {difference.step}, {difference.table}"
    for side in difference.sides:
        yield from _side_lines(side)


def _side_lines(side: Side) -> Iterable[str]:
    yield f"  {side.path} (rank {side.rank})" + ("" if side.note is None else f", {side.note}")
    yield from _indented(side.rows, "    ")


def _indented(lines: Iterable[str], by: str = "  ") -> Iterable[str]:
    empty = True
    for line in lines:
        empty = False
        yield by + line
    if empty:
        yield by + "nothing"
