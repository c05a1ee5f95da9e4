"""``scripts/bench.py step``: each phase of a decode step of real ranks, without HTTP.

Steady steps count: all rows decode, one token each. Times are medians over steps; ``step`` is from
one step's begin to the next one's on the leader.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from support.instance import Instance

from benchmarks.step_probe import MAIN_PHASES, STEP_PHASES, script
from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.models import (
    SHAPES,
    Shape,
    make_adapters,
    make_model,
    named_adapters,
    shape_of,
)
from mstar_tp.bench.report import Cell, Report, Table
from mstar_tp.common.errors import ConfigError
from mstar_tp.config import ServeConfig, build_config
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

PHASES = (*MAIN_PHASES, *STEP_PHASES)
PHASES_NOTE = (
    "ingest to turn: leader's main thread; verify to rows: step thread; each its own time, without "
    "what it calls and is named itself; forward holds the model and its head"
)
KERNELS_NOTE = (
    "kernels: torch's operators and our libraries' calls; host: what both threads did besides; "
    "both from profiled steps, which makes the host's share a little larger than it is"
)


class Work(NamedTuple):
    """The model, adapters and shape that steps are measured on."""

    model: str
    adapters: dict[str, str]
    shape: Shape


class Case(NamedTuple):
    """One column of the table."""

    tp: int
    rows: int
    adapters: int


def bench_step(args: argparse.Namespace) -> Report:
    """Measure every combination of ranks, rows and adapters that the flags name.

    Raises:
        MstarError: a rank does not start, or the model or an adapter cannot be used.
    """
    report = new_report("step", args.argv, program="scripts/bench.py")
    found: dict[str, dict[str, Cell]] = {}
    with work_of(args) as work:
        peft = _peft_steps(args, work) if args.peer == "peft" else {}
        for tp in args.tp:
            for case, stats in _measure(args, work, tp):
                theirs = peft.get((case.rows, case.adapters))
                found[_name(case)] = _stats(case, stats, theirs)
                report.details.setdefault("cells", []).append({**case._asdict(), **stats})
    columns = ("medians", *found)
    table = Table(title=f"decode steps: {args.model or args.size}", columns=columns)
    for stat in next(iter(found.values())):
        cells = [column[stat] for column in found.values()]
        if any(
            cell is not None for cell in cells
        ):  # else it was not asked for, or not measured here
            table.add(stat, *cells)
    profiled = any(column["kernels us"] is not None for column in found.values())
    table.notes += (PHASES_NOTE, KERNELS_NOTE) if profiled else (PHASES_NOTE,)
    report.tables.append(table)
    return report


@contextmanager
def work_of(args: argparse.Namespace) -> Iterator[Work]:
    """The model and adapters that the flags name, or random ones in a folder that goes again.

    Raises:
        ConfigError: the model or an adapter is not there.
    """
    most = max(args.adapters)
    with TemporaryDirectory(prefix="mstar-bench-") as name:
        folder = Path(name)
        if args.model is None:
            shape = SHAPES[args.size]
            model = str(make_model(folder / "model", shape))
        else:
            model, shape = args.model, shape_of(Path(args.model))
        given = named_adapters(args.lora)
        if given and len(given) < most:
            raise ConfigError(f"--adapters wants {most} and --lora names {len(given)}: give more")
        yield Work(model, given or make_adapters(folder, shape, most, args.rank), shape)


def _measure(
    args: argparse.Namespace, work: Work, tp: int
) -> Iterator[tuple[Case, dict[str, Any]]]:
    cases = [Case(tp, rows, n) for rows, n in _pairs(args)]
    env = {"MSTAR_TP_SHARED_MEMORY": "0"} if args.collectives == "gloo" else {}
    with TemporaryDirectory(prefix="mstar-bench-") as name:
        folder = Path(name)
        (folder / "mode").write_text("time", encoding="utf-8")
        before = folder / "before.py"
        before.write_text(script(folder), encoding="utf-8")
        config = _config(args, work, tp)
        with Instance(config, timeout_s=600, before=before, env=env) as instance:
            segments = Segments(instance, folder)
            for case in cases:
                yield case, _measure_case(args, work, case, segments)


class Segments:
    """Runs requests and gives back what the leader measured of them."""

    def __init__(self, instance: Instance, folder: Path) -> None:
        self._instance = instance
        self._folder = folder
        self._next = 0

    def run(self, requests: list[Any], then: str) -> dict[str, Any]:
        """Generate all; the segment's figures. The next segment is to be ``then``."""
        answers = self._instance.generate(requests)
        failed = next((answer.failed for answer in answers if answer.failed), None)
        if failed is not None:
            raise ConfigError(f"a request failed: {failed}")
        (self._folder / "mode").write_text(then, encoding="utf-8")
        self._instance.inspect()
        path = self._folder / f"rank0.{self._next}.json"
        self._next += 1
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def _measure_case(
    args: argparse.Namespace, work: Work, case: Case, segments: Segments
) -> dict[str, Any]:
    requests = _requests(args, work, case, args.tokens)
    segments.run(requests, "time")  # warms up: adapters are read and installed
    periods: list[float] = []
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number in range(args.runs):
        last = number == args.runs - 1
        steps = segments.run(requests, "profile" if last else "time")["steps"]
        steady = [s for s in steps if s["rows"] == s["tokens"] == case.rows]
        for step, after in itertools.pairwise(steady):
            if after["tp_seq"] == step["tp_seq"] + 1:
                periods.append((after["begin_ns"] - step["begin_ns"]) / 1e3)
        for phase, times in phases.items():
            times += [(s["main"] | s["step"]).get(phase, 0) / 1e3 for s in steady]
    profile = segments.run(requests, "time")
    kernels = profile["kernels"]
    if kernels:
        # Of the very steps that were profiled, so that a busy machine slows both sides alike.
        busy = [_busy_us(step) for step in profile["steps"] if step["profiled"]]
        waits = kernels["torch_us"] + kernels["cpp_us"] + kernels["collectives_us"]
        kernels["host_us"] = max(0.0, median(busy) - waits)
    return {
        "step_us": median(periods),
        "phases_us": {phase: median(times) for phase, times in phases.items()},
        "steps": len(periods),
        **kernels,
    }


def _busy_us(step: Mapping[str, Any]) -> float:
    """The microseconds that both threads worked for a step, without their waits for each other."""
    phases: dict[str, int] = step["main"] | step["step"]
    return sum(phases.values()) / 1e3


def _name(case: Case) -> str:
    return f"tp {case.tp}: {case.rows} rows, {case.adapters} adapters"


def _stats(case: Case, stats: Mapping[str, Any], peft_us: float | None) -> dict[str, Cell]:
    """The figures that the table shows of a case, from the whole step to its parts."""
    step = stats["step_us"]
    shown: dict[str, Cell] = {"step us": step, "tokens/s": 1e6 * case.rows / step}
    shown |= {f"{phase} us": stats["phases_us"][phase] for phase in PHASES}
    kernels = collectives = host = None
    if "torch_us" in stats:
        kernels = stats["torch_us"] + stats["cpp_us"]
        collectives = stats["collectives_us"]
        host = stats["host_us"]
    shown |= {"kernels us": kernels, "collectives us": collectives, "host us": host}
    shown |= {"peft us": peft_us, "peft / ours": None if peft_us is None else peft_us / step}
    return shown


def _pairs(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(rows, adapters): no more adapters than rows."""
    pairs = [(rows, n) for rows in args.rows for n in args.adapters if n <= rows]
    if not pairs:
        raise ConfigError("--adapters are more than --rows in every pair: ask for fewer")
    return pairs


def _requests(args: argparse.Namespace, work: Work, case: Case, tokens: int) -> list[Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0)
    names = list(work.adapters)[: case.adapters]
    return [
        (
            _prompt(args, work, row),
            params,
            AdapterKey(names[row % len(names)], FIRST_GENERATION) if names else None,
        )
        for row in range(case.rows)
    ]


def _prompt(args: argparse.Namespace, work: Work, row: int) -> list[int]:
    low = min(300, work.shape.vocab // 4)
    return [low + (37 * row + at) % (work.shape.vocab - low) for at in range(args.prompt_tokens)]


def _config(args: argparse.Namespace, work: Work, tp: int) -> ServeConfig:
    lora = {"adapters": work.adapters, "max_loras": len(work.adapters)} if work.adapters else None
    engine = {
        "model": work.model,
        "tensor_parallel_size": tp,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "max_model_len": args.prompt_tokens + args.tokens,
        "max_num_seqs": max(args.rows),
        "lora": lora,
    }
    return build_config({"engine": engine}, source="bench")


def _peft_steps(args: argparse.Namespace, work: Work) -> dict[tuple[int, int], float]:
    """Median microseconds between two tokens of a PEFT mixed batch, by (rows, adapters)."""
    from benchmarks.peft_peer import PeftMixed
    from mstar_tp.bench.load import Ask, Load

    peer = PeftMixed(work.model, work.adapters, args.threads)
    found = {}
    for rows, count in _pairs(args):
        names = tuple(work.adapters)[:count] or ("base",)
        asks = [
            Ask(model=names[row % len(names)], prompt=_prompt(args, work, row), at_s=0.0)
            for row in range(rows)
        ]
        load = Load(
            models=names,
            requests=rows,
            concurrency=rows,
            prompt_tokens=args.prompt_tokens,
            max_tokens=min(args.tokens, 32),
            seed=0,
        )
        peer.run(asks, load)
        gaps = []
        for _ in range(args.runs):
            stamps = peer.run(asks, load)[0].pieces_s
            gaps += [later - earlier for earlier, later in itertools.pairwise(stamps)]
        found[(rows, count)] = 1e6 * median(gaps)
    return found
