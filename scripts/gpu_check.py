#!/usr/bin/env python3
"""Run everything that a GPU is needed for: is each kernel and graph right, and how fast is it?

    python scripts/gpu_check.py [--budget SECONDS] [--only TEXT] [--no-timings] [--json]
    python scripts/gpu_check.py --interpret [--no-timings]

Needs this tree and torch, triton, numpy, safetensors, msgspec, rich and pyzmq; no pytest, no
model, no network. Small whole models are run too where transformers and peft are importable, and
vLLM's and SGLang's kernels stand beside ours where those are. What was left out, and why, is said.

Exit status: 0 where all that ran is right, 1 where something is wrong or failed, 2 where there is
no CUDA device. ``--interpret`` runs what it can at tiny sizes on the CPU, in Triton's interpreter:
that says nothing about a device, but that this script and the kernels' arithmetic work.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if TYPE_CHECKING:  # Triton reads TRITON_INTERPRET as it is imported
    import torch
    from benchmarks.kernel_cases import KernelCase

    from mstar_tp.bench.report import Report, Table

OVERTIME_S = 20.0
"""Seconds past the budget that the last check may take; then it hangs, and the exit status is 1."""
BAR = ("lora o", 64, 32, "rank 16", 0.7)
"""Operation, rows, adapters and rank of the cell that must reach this share of the ceiling."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds in all")
    parser.add_argument("--only", default="", help="only checks whose name has this in it")
    parser.add_argument("--no-timings", action="store_true", help="correctness alone")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every figure")
    options = parser.parse_args()
    ends = time.monotonic() + options.budget
    # A kernel that never ends would keep its check, and so this script, for ever.
    limit_s = max(1.0, options.budget) + OVERTIME_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.interpret and not torch.cuda.is_available():
        faulthandler.cancel_dump_traceback_later()
        print("no CUDA device: nothing to check (--interpret runs on the CPU)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.interpret else torch.device("cuda", 0)
    from mstar_tp.bench.hardware import machine, versions
    from mstar_tp.bench.report import Report, Table, show

    report = Report(
        part="gpu check", command=" ".join(sys.argv), machine=machine(), versions=versions()
    )
    checks = Table(title="checks", columns=("check", "outcome", "s", "why"))
    report.tables.append(checks)
    with torch.no_grad():
        report.failed = _run_checks(checks, device, options, ends)
        if not options.no_timings:
            _run_timings(report, device, options, ends)
    faulthandler.cancel_dump_traceback_later()
    if options.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report)
    if report.failed:
        print(f"{report.failed} checks are wrong or failed", file=sys.stderr)
    return 1 if report.failed else 0


def _run_checks(
    table: Table, device: torch.device, options: argparse.Namespace, ends: float
) -> int:
    """A line for every check, run or left out; how many are wrong or failed."""
    from support.device_checks import CHECKS

    failed = 0
    for check in CHECKS:
        if options.only not in check.name:
            continue
        missing = [name for name in check.modules if importlib.util.find_spec(name) is None]
        why = None
        if check.cuda and device.type != "cuda":
            why = "needs a CUDA device"
        elif missing:
            why = f"{' and '.join(missing)} cannot be imported"
        elif time.monotonic() > ends:
            why = "no time left: raise --budget"
        if why is not None:
            table.add(check.name, "left out", None, why)
            continue
        began, outcome, why = time.monotonic(), "right", ""
        try:
            check.run(device, options.interpret)
        except Exception as error:  # each is told, and the next runs
            failed += 1
            outcome = "WRONG" if isinstance(error, AssertionError) else "FAILED"
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            traceback.print_exc()
        table.add(check.name, outcome, round(time.monotonic() - began, 1), why)
        print(f"{check.name}: {outcome}", file=sys.stderr, flush=True)
    return failed


def _run_timings(
    report: Report, device: torch.device, options: argparse.Namespace, ends: float
) -> None:
    """A table of kernels against the device's ceilings, and peers' beside.

    It has as many as time allows, the most important first.
    """
    from benchmarks.ceilings import BUFFER_BYTES, Timer, measure_ceilings
    from benchmarks.kernels import COLUMNS, add_case

    from mstar_tp.bench.models import SHAPES
    from mstar_tp.bench.report import Table

    shape = SHAPES["nano" if options.interpret else "large"]
    timer = Timer(device, 1 if options.interpret else 20)
    size = 1 << 20 if options.interpret else BUFFER_BYTES
    ceilings = measure_ceilings(timer, shape.dtype, size)
    table, notes = Table(title="kernels", columns=COLUMNS), list[str]()
    report.tables.append(table)
    for case in _timed(device, options.interpret, notes):
        if time.monotonic() > ends:
            notes.append("no time left: later cells are left out; raise --budget")
            break
        try:
            add_case(table, case, timer, ceilings)
        except Exception as error:  # a figure less, not a wrong result: checks tell those
            notes.append(f"{case.op}, {case.rows} rows: {type(error).__name__}: {error}"[:300])
    peers = ("vllm", "sglang")
    absent = [name for name in peers if importlib.util.find_spec(name) is None]
    notes += [f"{name} cannot be imported: not compared" for name in absent]
    notes += _bars(table, peers)
    table.notes += [
        f"ceilings: copy {ceilings.copy_bytes_s / 1e9:.1f} GB/s, read "
        f"{ceilings.read_bytes_s / 1e9:.1f} GB/s, GEMM {ceilings.gemm_flops_s / 1e9:.0f} GFLOP/s",
        *notes,
    ]


def _bars(table: Table, peers: tuple[str, ...]) -> list[str]:
    """The bars that the figures must reach, each with its result."""
    op, rows, adapters, rank, wanted = BAR
    told = []
    for line in table.as_dicts():
        same = (line["op"], line["rows"], line["adapters"]) == (op, rows, adapters)
        if same and str(line["sizes"]).endswith(rank):
            share = line["share"]
            met = isinstance(share, float) and share >= wanted
            told = [
                f"bar: {op}, {rows} rows, {adapters} adapters, {rank}: share {share} of at least "
                f"{wanted}: {'met' if met else 'NOT met'}"
            ]
    for peer in peers:
        times = [line["peer / ours"] for line in table.as_dicts() if line["peer"] == peer]
        if times:
            faster = sum(isinstance(each, float) and each > 1 for each in times)
            told.append(f"bar: faster than {peer} in {faster} of {len(times)} cells")
    return told


def _timed(device: torch.device, tiny: bool, notes: list[str]) -> Iterator[KernelCase]:
    """The most important first."""
    from benchmarks.kernel_cases import attention_cases
    from benchmarks.kernel_experts import expert_cases
    from benchmarks.kernel_lora import delta_cases

    from mstar_tp.bench.models import SHAPES

    if tiny:
        yield from delta_cases(SHAPES["nano"], (2,), (1,), 4, device, notes)
        yield from expert_cases(
            (2,), device, SHAPES["nano"].dtype, hidden=64, inner=16, experts=4, choices=2
        )
        return
    shape = SHAPES["large"]
    yield from delta_cases(shape, (64,), (32,), 16, device, notes)
    yield from attention_cases(shape, (1, 16, 64), (2048,), device)
    yield from expert_cases(
        (1, 16, 64, 256, 2048),
        device,
        shape.dtype,
        hidden=2048,
        inner=768,
        experts=128,
        choices=8,
    )
    for rank in (16, 64, 8, 128):
        yield from delta_cases(shape, (1, 8, 64, 256, 2048), (1, 8, 32, 64), rank, device, notes)


if __name__ == "__main__":
    sys.exit(main())
