#!/usr/bin/env python3
"""The cost of deciding alike on every rank: admits, the schedule channel, collectives.

    python scripts/bench_lockstep.py
    python scripts/bench_lockstep.py --requests 1000 --json

    admit        a pool's admit of a step whose rows all hold their slots, and what stands beside it
                 in a step: the whole admit (rows built, pages), every table's hash, one entry put
                 into a recording
    order        real ranks over ipc, one request of one token at a time, so that each step finds
                 the follower idle: from the leader's broadcast of a step to the start of that step
                 on the follower's step thread, as both recorded it
    collectives  thread-ranks; what each kind of step calls, by name and number

A tiny model and its adapters are made in a temporary folder. Times are of this machine's clock; run
it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import support_path  # noqa: F401  # tests/support becomes importable
import torch
from rich.console import Console
from rich.table import Table
from support.instance import Instance
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.checks import TableChecks
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.step.step_tables import StepTables
from mstar_tp.lora.spec import LoraReqConfig
from mstar_tp.recording import NO_RECORDING, FileRecorder
from mstar_tp.recording.entries import FORMAT, Checked, Ran, Start, schema_hash
from mstar_tp.recording.reader import read_recording
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import Checks, Step
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

SLOTS = 8
NO_CHECKS = Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0)
ADMIT_BAR_US = 20.0
ORDER_BAR_US = 300.0


class Spread(NamedTuple):
    """Microseconds."""

    p10: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Spread:
        ordered = sorted(nanoseconds)
        places = (0.1, 0.5, 0.9, 0.99)
        return cls(*(round(ordered[int(len(ordered) * at)] / 1e3, 1) for at in places))


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = _make_model(folder)
        stats = {
            "admit": _admits(folder, args.rows, args.repeats),
            "order": _order(folder, names, args.requests),
            "collectives": _collectives(folder, names),
        }
    bars = {
        "admit p50 us": (stats["admit"]["pool admit"].p50, ADMIT_BAR_US),
        "order p50 us": (stats["order"]["follower starts"].p50, ORDER_BAR_US),
        "collectives beside the model's": (_extra(stats["collectives"]), 0),
    }
    if args.json:
        plain = {
            part: {k: v._asdict() if isinstance(v, Spread) else v for k, v in rows.items()}
            for part, rows in stats.items()
        }
        verdicts = {
            k: {"got": got, "bar": bar, "met": got <= bar} for k, (got, bar) in bars.items()
        }
        print(json.dumps({**plain, "bars": verdicts}, indent=2))
    else:
        _report(stats, bars)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="of a step (default 64)")
    parser.add_argument("--repeats", type=int, default=5000, help="admits timed (default 5000)")
    parser.add_argument("--requests", type=int, default=500, help="steps timed (default 500)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead")
    return parser.parse_args()


def _make_model(folder: Path) -> dict[str, str]:
    """A tiny model and three adapters; name -> folder of each."""
    make_tiny_model(folder / "model", "llama", seed=7)
    names = {name: str(folder / name) for name in "abc"}
    for seed, name in enumerate(names):
        make_adapter(folder / name, folder / "model", rank=4, seed=seed)
    return names


# ---------------------------------------------------------------------------- admit


def _admits(folder: Path, num_rows: int, repeats: int) -> dict[str, Spread]:
    requests = RequestTable()
    kv = KvPool(PageTable(num_rows, 16), lambda rid: requests[rid].expected)
    pool = _pool(folder, num_rows)
    tables = StepTables(requests, (pool, kv))
    for rid in range(num_rows):
        key = AdapterKey(f"l{rid % SLOTS}", FIRST_GENERATION)
        params = SamplingParams(max_tokens=1 << 30)
        requests.add(NewRequest(rid=rid, prompt=(1,), params=params, adapter=key))
        pool.ingest_request(rid, LoraReqConfig(key))
    step = _step(0, num_rows)
    admitted = tables.admit(step)
    assert len(admitted.step.rows) == num_rows and not admitted.failed
    checks = TableChecks(0, requests, kv, LoraPools([pool]), NO_RECORDING)
    recorder = FileRecorder(folder / "bench.rec")
    recorder.start(_start_entry())
    entry = Ran(tp_seq=0, failed=(), ended=(), refused=False)
    try:
        return {
            "pool admit": _timed(lambda: pool.admit(admitted.step), repeats),
            "whole admit": _timed(lambda: tables.admit(step), repeats),
            "hashes of all tables": _timed(checks.now, repeats),
            "put of a recorded entry": _timed(lambda: recorder.put(entry), repeats),
        }
    finally:
        recorder.close()
        pool.close()


def _timed(work: Callable[[], Any], repeats: int) -> Spread:
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        work()
        spent.append(time.perf_counter_ns() - begin)
    return Spread.of(spent)


def _step(tp_seq: int, num_rows: int) -> Step:
    rows = tuple((rid, 1) for rid in range(num_rows))
    return Step(ingested=0, tp_seq=tp_seq, planned_after=-1, rows=rows, checks=NO_CHECKS)


def _pool(folder: Path, num_rows: int) -> LoraAdapterPool:
    """A pool of one rank with every adapter's copy in."""
    spec = tiny_spec(slots=SLOTS, cpu_capacity=SLOTS)
    landed = threading.Semaphore(0)

    def report(copy: CopyIn) -> None:
        assert copy.cause is None, copy.cause
        landed.release()

    pool = LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=report,
    )
    keys = [AdapterKey(f"l{slot}", FIRST_GENERATION) for slot in range(SLOTS)]
    pool.loads.preload(
        [(key, str(write_adapter(folder / key.name, q_pairs(spec, b=0.1)))) for key in keys]
    )
    for _ in keys:
        assert landed.acquire(timeout=60)
    return pool


def _start_entry() -> Start:
    return Start(
        format=FORMAT,
        schema=schema_hash(),
        version="bench",
        rank=0,
        world_size=1,
        epoch=0,
        config_digest="",
        num_pages=1,
        page_size=1,
        lora=(),
    )


# ---------------------------------------------------------------------------- order


def _order(folder: Path, names: dict[str, str], count: int) -> dict[str, Spread]:
    base = folder / "run.rec"
    params = SamplingParams(max_tokens=1, temperature=0)
    key = AdapterKey("a", FIRST_GENERATION)
    with Instance(_config(folder, names, record=str(base))) as instance:
        for number in range(count):
            instance.generate([((5, 6, 7), params, key if number % 2 else None)])
    sent = _times(base, 0, lambda entry: isinstance(entry, Step))
    ways = {
        "leader starts": _times(base, 0, _starts),
        "follower applies": _times(base, 1, lambda entry: isinstance(entry, Step)),
        "follower starts": _times(base, 1, _starts),
    }
    return {
        way: Spread.of([at[tp_seq] - sent[tp_seq] for tp_seq in sent if tp_seq in at])
        for way, at in ways.items()
    }


def _starts(entry: Any) -> bool:
    """The first thing a step thread does with a step."""
    return isinstance(entry, Checked) and "slots" in entry.hashes


def _times(base: Path, rank: int, picks: Callable[[Any], bool]) -> dict[int, int]:
    """Step -> when ``rank`` put the entry that is picked."""
    recording = read_recording(base.with_name(f"{base.name}.rank{rank}"))
    return {t.entry.tp_seq: t.at_ns for t in recording.entries if picks(t.entry)}  # type: ignore[union-attr]


def _config(folder: Path, names: dict[str, str], **engine: Any) -> ServeConfig:
    tree = {
        "model": str(folder / "model"),
        "tensor_parallel_size": 2,
        "threads": 1,
        "max_model_len": 64,
        "lora": {"adapters": names, "max_loras": 2},
        **engine,
    }
    return build_config({"engine": tree}, source="bench")


# ---------------------------------------------------------------------------- collectives


def _collectives(folder: Path, names: dict[str, str]) -> dict[str, dict[str, int]]:
    ranks = LockstepRanks(_config(folder, names).engine)
    params = SamplingParams(max_tokens=60, temperature=0)

    def count(*rows: tuple[int, int]) -> dict[str, int]:
        ranks.calls.clear()
        ranks.step(rows)
        return dict(sorted(ranks.calls.items()))

    try:
        base = ranks.open((5, 6, 7), params)
        rids = [ranks.open((5, 6, 7), params, AdapterKey(n, FIRST_GENERATION)) for n in "ab"]
        for rid in rids:
            assert ranks.wait_copies(rid) is None
        counts = {"base rows": count((base, 3))}
        counts["two adapters miss"] = count((base, 1), *((rid, 3) for rid in rids))
        counts["all hold their slots"] = count((base, 1), *((rid, 1) for rid in rids))
        again = ranks.open((5, 6, 7), params, AdapterKey("a", FIRST_GENERATION))
        counts["a row joins a resident adapter"] = count((base, 1), (again, 3))
        return counts
    finally:
        ranks.close()


def _extra(counts: dict[str, dict[str, int]]) -> int:
    """The calls of steps without a miss beside those of a base step."""
    own = Counter(counts["base rows"])
    return max(
        (Counter(calls) - own).total()
        for kind, calls in counts.items()
        if kind != "two adapters miss"
    )


# ---------------------------------------------------------------------------- report


def _report(stats: dict[str, Any], bars: dict[str, tuple[float, float]]) -> None:
    console = Console()
    for part in ("admit", "order"):
        table = Table(f"{part}, us", *Spread._fields)
        for name, spread in stats[part].items():
            table.add_row(name, *(str(value) for value in spread))
        console.print(table)
    table = Table("collectives of a step", "calls")
    for kind, calls in stats["collectives"].items():
        table.add_row(kind, ", ".join(f"{count} {name}" for name, count in calls.items()))
    console.print(table)
    table = Table("bar", "got", "at most", "met")
    for name, (got, bar) in bars.items():
        table.add_row(name, str(got), str(bar), "yes" if got <= bar else "no")
    console.print(table)


if __name__ == "__main__":
    main()
