#!/usr/bin/env python3
"""Collectives of CPU ranks over shared memory against gloo's: microseconds a call, in one run.

    python scripts/bench_collectives.py
    python scripts/bench_collectives.py --tp 2 4 --kb 2 8 64 1024 4096 --json

Real rank processes, one thread each. Both ways take turns, a block of calls each; the figure is the
median over the blocks of a block's mean on rank 0. ``--spin``, ``--yield``: other ways to wait.

    all_reduce   float32 of that many KB, in place
    agree        three int64 votes
    broadcast    eight int64, rank 0's to all
    gather       [8, KB] float32 to rank 0, joined along the last dim
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mstar_tp.distributed import start
from mstar_tp.distributed.comm import CommGroup, TorchGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup

Row = dict[str, str | int | float]


def main() -> None:
    args = _arguments()
    start.PATIENCE = replace(start.PATIENCE, spin_us=args.spin, yield_us=args.yields)
    rows = [row for world_size in args.tp for row in _run_ranks(args, world_size)]
    if args.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows}))
        return
    table = Table("tp", "collective", "KB", "gloo us", "shared us", "ratio")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print("load of the machine:", *(f"{load:.1f}" for load in os.getloadavg()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kb", type=int, nargs="+", default=[2, 8, 64, 512, 4096])
    parser.add_argument("--blocks", type=int, default=15, help="blocks of calls a way (default 15)")
    spin, yields = start.PATIENCE.spin_us, start.PATIENCE.yield_us
    parser.add_argument("--spin", type=int, default=spin, help="microseconds to spin")
    parser.add_argument(
        "--yield", type=int, default=yields, dest="yields", help="microseconds to yield after that"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead")
    return parser.parse_args()


def _run_ranks(args: argparse.Namespace, world_size: int) -> list[Row]:
    """Fork the ranks; rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _rank(args, Path(folder), rank, world_size)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            sys.exit("a rank failed")
        rows: list[Row] = json.loads((Path(folder) / "rows").read_text())
        return rows


def _rank(args: argparse.Namespace, folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    meeting = start.Rendezvous(store, rank, world_size)
    shared = start.init_groups(torch.device("cpu"), meeting).tp
    if not isinstance(shared, SharedMemoryGroup):
        sys.exit("these ranks cannot share memory: see MSTAR_TP_LOG_LEVEL=INFO")
    gloo = TorchGroup(dist.group.WORLD, dist.new_group(backend="gloo"))
    rows = []
    for kb in args.kb:
        x = torch.ones(kb << 8)
        rows.append(_measure(args, "all_reduce", kb, gloo, shared, lambda g, x=x: g.all_reduce(x)))
    ids, logits = torch.arange(8), torch.ones(8, 256)
    rows.append(_measure(args, "agree", 0, gloo, shared, lambda g: g.agree([1, 2, 3])))
    rows.append(_measure(args, "broadcast", 0, gloo, shared, lambda g: g.broadcast(ids)))
    rows.append(_measure(args, "gather", 8, gloo, shared, lambda g: g.gather(logits)))
    if rank == 0:
        rows = [{"tp": world_size, **row} for row in rows]
        (folder / "rows").write_text(json.dumps(rows))
    shared.agree([0])
    start.destroy_groups()


def _measure(
    args: argparse.Namespace,
    name: str,
    kb: int,
    gloo: CommGroup,
    shared: CommGroup,
    call: Callable[[CommGroup], object],
) -> Row:
    calls = max(5, min(100, 4096 // max(kb, 1)))
    means: dict[str, list[float]] = {"gloo": [], "shared": []}
    for block in range(args.blocks + 1):
        for way, group in (("gloo", gloo), ("shared", shared)):
            shared.agree([0])
            begin = time.perf_counter()
            for _ in range(calls):
                call(group)
            if block:  # the first warms up
                means[way].append(1e6 * (time.perf_counter() - begin) / calls)
    slow, fast = median(means["gloo"]), median(means["shared"])
    return {
        "collective": name,
        "KB": kb,
        "gloo_us": round(slow, 1),
        "shared_us": round(fast, 1),
        "ratio": round(slow / fast, 1),
    }


if __name__ == "__main__":
    main()
