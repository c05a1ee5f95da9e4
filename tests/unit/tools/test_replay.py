"""Pins what a replay makes of a recording written by hand, and what it says of a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mstar_tp.cli.main import main
from mstar_tp.common.errors import RecordingError
from mstar_tp.engine.resources.lora import vote
from mstar_tp.engine.resources.lora.vote import CopyState, Miss
from mstar_tp.recording import FileRecorder
from mstar_tp.recording.entries import (
    FORMAT,
    Agreed,
    Charged,
    Checked,
    Entry,
    LoraSizes,
    Opened,
    Ran,
    Start,
    TableDump,
    schema_hash,
)
from mstar_tp.tools.replay.replay_command import build_report
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import Checks, DropCopy, Preempt, Remove, Step
from mstar_tp.wire.values import AdapterKey

A, B = AdapterKey("a", 0), AdapterKey("b", 0)
NO_CHECKS = Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0)


def start(rank: int = 1, **lora: object) -> Start:
    sizes = {"slots": 1, "cpu_capacity": 1, "cpu_unit": "adapters", "adapters": (A, B), **lora}
    return Start(
        format=FORMAT,
        schema=schema_hash(),
        version="test",
        rank=rank,
        world_size=2,
        epoch=0,
        config_digest="d",
        num_pages=4,
        page_size=2,
        lora=(LoraSizes(**sizes),),  # type: ignore[arg-type]
    )


def write(path: Path, entries: Sequence[Entry], first: Start | None = None) -> Path:
    recorder = FileRecorder(path)
    for entry in entries:
        recorder.put(entry)
    recorder.start(first or start())
    recorder.close()
    return path


def step(tp_seq: int, ingested: int, *rows: tuple[int, int], checks: Checks = NO_CHECKS) -> Step:
    return Step(
        ingested=ingested, tp_seq=tp_seq, planned_after=tp_seq - 1, rows=rows, checks=checks
    )


def agreed(tp_seq: int, key: AdapterKey, state: CopyState = CopyState.IN) -> Agreed:
    return Agreed(tp_seq=tp_seq, values=tuple(vote.cast(tp_seq, [Miss(key, state, "d1")], 1, 1)))


def ran(tp_seq: int, **outcome: tuple[int, ...]) -> Ran:
    return Ran(**{"tp_seq": tp_seq, "failed": (), "ended": (), "refused": False, **outcome})


# One slot, one place in the CPU cache. Request 0 on a runs and ends; 1 on b waits for both.
TWO_REQUESTS: tuple[Entry, ...] = (
    Opened(rid=0, num_prompt=3, adapter=A),
    Opened(rid=1, num_prompt=2, adapter=B),
    step(0, 2, (0, 3)),
    agreed(0, A),
    ran(0),
    step(1, 2, (0, 1)),
    ran(1, ended=(0,)),
    Remove(ingested=2, after_tp_seq=1, rid=0),
    step(2, 2, (1, 2)),
    agreed(2, B),
    ran(2),
)


def texts(path: Path, step: int | None = None) -> dict[str, list[str]]:
    report = build_report(path, step, None)
    tables = report.tables if report.view is None else report.view.before
    assert tables is not None
    return {table: [str(row) for row in rows] for table, rows in tables.items()}


def test_tables_follow_from_the_entries_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "r", TWO_REQUESTS)
    assert texts(path, 1) == {
        "cpu_cache": ["a#0: hold 1"],
        "served": ["a#0", "b#0"],
        "slots": ["slot 1: a#0, held by 0, used at 1"],
        "pages": ["request 0: pages 0-1"],
        "tokens": [
            "request 0 on a#0: 3 prompt, 1 sampled, 3 computed",
            "request 1 on b#0: 2 prompt, 0 sampled, 0 computed",
        ],
    }
    assert texts(path) == {
        "cpu_cache": ["b#0: hold 2"],
        "served": ["a#0", "b#0"],
        "slots": ["slot 1: b#0, held by 1, used at 3"],
        "pages": ["request 1: pages 2"],
        "tokens": ["request 1 on b#0: 2 prompt, 1 sampled, 2 computed"],
    }


def test_a_row_that_failed_everywhere_gets_no_slot(tmp_path: Path) -> None:
    entries = (*TWO_REQUESTS[:3], agreed(0, A, CopyState.FAILED), ran(0, failed=(0,)))
    drop = DropCopy(ingested=2, after_tp_seq=0, key=A, fetch_no=1, rank=0, cause="gone")
    failed = CopyIn(rank=1, key=A, fetch_no=1, digest=None, cause="gone")
    path = write(
        tmp_path / "r", (failed, *entries, drop, Remove(ingested=2, after_tp_seq=0, rid=0))
    )
    assert texts(path)["slots"] == ["slot 1: empty, used at 0"]
    assert texts(path)["cpu_cache"] == ["b#0: hold 2"]


def test_preempted_rows_give_their_pages_and_keep_their_slot(tmp_path: Path) -> None:
    entries = (*TWO_REQUESTS[:5], Preempt(ingested=2, after_tp_seq=0, rid=0))
    tables = texts(write(tmp_path / "r", entries))
    assert tables["pages"] == []
    assert tables["slots"] == ["slot 1: a#0, held by 0, used at 1"]
    assert tables["tokens"][0] == "request 0 on a#0: 3 prompt, 1 sampled, 0 computed"


def test_adapters_cost_what_they_cost_then(tmp_path: Path) -> None:
    sizes = start(cpu_unit="bytes", cpu_capacity=100)
    costs = (Charged(key=A, cost=70), Charged(key=B, cost=30))
    assert texts(write(tmp_path / "r", costs, sizes))["cpu_cache"] == ["a#0: hold 1", "b#0: hold 2"]
    costs = (Charged(key=A, cost=70), Charged(key=B, cost=31))
    assert texts(write(tmp_path / "s", costs, sizes))["cpu_cache"] == ["a#0: hold 1"]


def test_a_step_that_does_not_end_in_the_recording_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "r", TWO_REQUESTS[:6])
    assert texts(path)["tokens"][0] == "request 0 on a#0: 3 prompt, 1 sampled, 3 computed"
    report = build_report(path, 1, None)
    assert report.view is not None and report.view.after is None


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (
            TWO_REQUESTS[1:],
            "before the first step: Step stands after 1 conductor messages, wanted 2",
        ),
        ((*TWO_REQUESTS[:3], ran(0)), "in step 0: the step asks for an agreement that is not"),
        ((*TWO_REQUESTS[:4], agreed(0, A), ran(0)), "in step 0: it holds more agreements than"),
        (
            (*TWO_REQUESTS[:3], agreed(0, B), ran(0)),
            "in step 0: the step misses other adapters than",
        ),
        ((*TWO_REQUESTS[:4], ran(0, refused=True)), "in step 0: .*refused"),  # type: ignore[arg-type]
        ((step(0, 0, (7, 1)), ran(0)), "in step 0: no 7"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused_at_its_place(
    tmp_path: Path, entries: Sequence[Entry], says: str
) -> None:
    path = write(tmp_path / "r", entries)
    with pytest.raises(RecordingError, match=says) as error:
        build_report(path, None, None)
    assert str(error.value).startswith(str(path))


def test_a_rank_that_was_otherwise_than_the_order_makes_it_is_shown_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Checked(tp_seq=1, hashes={"pages": 7})
    dump = TableDump(tp_seq=1, table="pages", rows=("request 0: pages 3 2",))
    path = write(tmp_path / "r", (*TWO_REQUESTS[:6], own, dump))
    assert main(["replay", str(path)]) == 1
    text = capsys.readouterr().out
    assert "step 1: the rank's table of pages is not what the order makes of it" in text
    assert "as the order makes it\n    request 0: pages 0-1\n" in text
    assert "as the rank had it\n    request 0: pages 3 2\n" in text


def compare(
    capsys: pytest.CaptureFixture[str], a: Path, b: Path
) -> tuple[int, dict[str, object] | None]:
    code = main(["replay", str(a), "--compare", str(b), "--json"])
    difference: dict[str, object] | None
    difference = json.loads(capsys.readouterr().out)["comparison"]["difference"]
    return code, difference


@pytest.mark.parametrize(
    ("index", "other", "step_no", "table"),
    [
        (1, Opened(rid=1, num_prompt=1, adapter=B), 0, "order"),
        (2, step(0, 2, (0, 2)), 0, "order"),
        (6, ran(1), 1, "outcome"),
        (7, Remove(ingested=2, after_tp_seq=1, rid=1), 2, "order"),
        (9, agreed(2, B, CopyState.FAILED), 2, "agreement"),
    ],
)
def test_the_first_entry_that_differs_is_named_with_its_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    index: int,
    other: Entry,
    step_no: int,
    table: str,
) -> None:
    a = write(tmp_path / "a", TWO_REQUESTS)
    changed = (*TWO_REQUESTS[:index], other, *TWO_REQUESTS[index + 1 :])
    code, difference = compare(capsys, a, write(tmp_path / "b", changed))
    assert code == 1 and difference is not None
    assert (difference["step"], difference["table"]) == (step_no, table)


def test_copies_and_their_times_are_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leader = start(rank=0)
    copies = [CopyIn(rank=rank, key=A, fetch_no=1, digest="d1", cause=None) for rank in (0, 1)]
    entries: list[Entry] = list(TWO_REQUESTS)
    entries[1:1] = copies
    a = write(tmp_path / "a", TWO_REQUESTS)
    code, difference = compare(capsys, a, write(tmp_path / "b", entries, leader))
    assert (code, difference) == (0, None)
    assert main(["replay", str(a), "--compare", str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out
    assert "the two recordings are the same" in told and "tables" not in told


def test_other_sizes_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", TWO_REQUESTS)
    b = write(tmp_path / "b", TWO_REQUESTS, start(slots=2, cpu_capacity=2))
    assert main(["replay", str(a), "--compare", str(b)]) == 1
    assert "cannot be compared: lora is" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    path = write(tmp_path / "r", TWO_REQUESTS)
    command = [sys.executable, "-m", "mstar_tp", "replay", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""


def test_a_replay_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "r", TWO_REQUESTS)
    script = f"""
import sys
sys.modules["torch"] = None
from mstar_tp.cli.main import main
sys.exit(main(["replay", {str(path)!r}, "--step", "2", "--compare", {str(path)!r}]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "slot 1: b#0, held by 1" in ended.stdout
