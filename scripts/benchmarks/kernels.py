"""``scripts/bench.py kernels``: each operation of a step against what this machine can do at most.

Main thread. A share is the time that the bytes (at the faster of a copy's and a read's speed) or
the arithmetic (at a large GEMM's speed) take at least, whichever is more, over the time measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.ceilings import BUFFER_BYTES, Ceilings, Timer, measure_ceilings
from benchmarks.collectives import measure_collectives
from benchmarks.kernel_cases import KernelCase, attention_cases, gemm_cases, small_cases
from benchmarks.kernel_lora import delta_cases, operator_cases
from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.models import SHAPES, Shape, shape_of
from mstar_tp.bench.report import Report, Table
from mstar_tp.common.errors import ConfigError

COLUMNS = (
    *("op", "sizes", "rows", "adapters", "MB", "MFLOP", "us", "share", "bound by"),
    *("peer", "peer us", "peer / ours"),
)
COLLECTIVE_KB = (2, 8, 64, 512)


def bench_kernels(args: argparse.Namespace) -> Report:
    """Measure every operation that the flags name.

    Raises:
        ConfigError: there is no such device, or ``--only`` names nothing.
        MstarError: ranks for collectives cannot be started.
    """
    report = new_report("kernels", args.argv, program="scripts/bench.py")
    device, shape = _device(args.device), _shape(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    timer = Timer(device, args.repeats)
    buffer_bytes = BUFFER_BYTES if args.size != "nano" or args.model else 1 << 20
    ceilings = measure_ceilings(timer, shape.dtype, buffer_bytes)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    table = Table(
        title=f"kernels: {args.model or args.size}, {str(shape.dtype)[6:]}, {device.type}{threads}",
        columns=COLUMNS,
    )
    notes: list[str] = []
    with torch.no_grad():
        for case in _cases(args, shape, device, notes):
            add_case(table, case, timer, ceilings)
    _add_collectives(args, table, ceilings)
    if not table.rows:
        raise ConfigError(f"--only {args.only}: no operation's name holds that")
    table.notes += [
        f"ceilings: copy {ceilings.copy_bytes_s / 1e9:.1f} GB/s, read "
        f"{ceilings.read_bytes_s / 1e9:.1f} GB/s, GEMM {ceilings.gemm_flops_s / 1e9:.0f} GFLOP/s",
        "share: of the nearer ceiling, which 'bound by' names; peer / ours: how many times as long "
        "the peer takes for the same work",
        *notes,
    ]
    report.tables.append(table)
    report.details["ceilings"] = asdict(ceilings)
    return report


def _cases(
    args: argparse.Namespace, shape: Shape, device: torch.device, notes: list[str]
) -> Iterator[KernelCase]:
    decode = [count for count in args.rows if count <= 64] or list(args.rows)
    kinds: dict[str, Callable[[], Iterator[KernelCase]]] = {
        "gemm": lambda: gemm_cases(shape, args.rows, device),
        "lora": lambda: delta_cases(shape, args.rows, args.adapters, args.rank, device, notes),
        "operator": lambda: operator_cases(shape, decode, args.adapters, args.rank, device),
        "attention": lambda: attention_cases(shape, decode, args.context, device),
        "norm": lambda: (c for c in small_cases(shape, args.rows, device) if "norm" in c.op),
        "silu": lambda: (c for c in small_cases(shape, args.rows, device) if "silu" in c.op),
        "rotation": lambda: (c for c in small_cases(shape, args.rows, device) if "rot" in c.op),
    }
    for kind, make in kinds.items():
        if not args.only or kind in args.only.split(","):
            yield from make()


def add_case(table: Table, case: KernelCase, timer: Timer, ceilings: Ceilings) -> None:
    """A line for the case, and one more for each further thing that stands beside it."""
    times = timer.medians({"": case.work} | case.beside)
    took = times.pop("") / case.calls
    by_bytes = case.num_bytes / ceilings.bytes_s
    by_flops = case.flops / ceilings.gemm_flops_s
    share, bound = max((by_bytes / took, "memory"), (by_flops / took, "GEMM"))
    own = (1e6 * took, share, bound)
    what = (case.op, case.sizes, case.rows, case.adapters)
    work = (case.num_bytes / 1e6, case.flops / 1e6)
    if not times:
        table.add(*what, *work, *own, None, None, None)
    for name, other in times.items():
        theirs = other / case.calls
        table.add(*what, *work, *own, name, 1e6 * theirs, theirs / took)


def _add_collectives(args: argparse.Namespace, table: Table, ceilings: Ceilings) -> None:
    if args.only and "collectives" not in args.only.split(","):
        return
    for tp in args.tp:
        for found in measure_collectives(tp, COLLECTIVE_KB, args.repeats):
            what = (f"{found.name}, tp {tp}", "", tp, 0)
            # Each rank writes its own part and reads all.
            moved = (tp + 1) * found.num_bytes
            share = 1e6 * moved / ceilings.bytes_s / found.shared_us
            own = (moved / 1e6, 0.0, found.shared_us, share, "memory")
            table.add(*what, *own, "gloo", found.gloo_us, found.gloo_us / found.shared_us)


def _device(wanted: str) -> torch.device:
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("--device is cuda and torch sees no GPU here: choose cpu or auto")
    return torch.device("cuda" if there and wanted != "cpu" else "cpu")


def _shape(args: argparse.Namespace) -> Shape:
    shape = SHAPES[args.size] if args.model is None else shape_of(Path(args.model))
    return shape if args.dtype == "auto" else replace(shape, dtype=getattr(torch, args.dtype))
