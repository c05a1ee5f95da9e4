#!/usr/bin/env python3
"""Collectives of CPU ranks over shared memory against gloo's: microseconds a call, in one run.

    python scripts/bench_collectives.py
    python scripts/bench_collectives.py --tp 2 4 --kb 2 8 64 1024 4096 --json
    python scripts/bench_collectives.py --tp 2 --model MODEL_DIR --rows 8 --tokens 100 --runs 7

Real rank processes, one thread each. Both ways take turns, a block of calls each; the figure is the
median over the blocks of a block's mean on rank 0. ``--spin``, ``--yield``: other ways to wait.

    all_reduce   float32 of that many KB, in place
    agree        three int64 votes
    broadcast    eight int64, rank 0's to all
    gather       [8, 256] float32 to rank 0, joined along the last dim

With ``--model``: milliseconds a decode step of real ranks without HTTP, both ways up at once and
run in turn; medians over the runs, and whether the texts were equal (at tp 2 they must be: gloo
adds in the same order there).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mstar_tp.config import build_config
from mstar_tp.distributed import start
from mstar_tp.distributed.comm import CommGroup, TorchGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup
from mstar_tp.testing.instance import Instance
from mstar_tp.wire.messages import SamplingParams

Row = dict[str, str | int | float]
PROMPT = 16


def main() -> None:
    args = _arguments()
    if args.model is not None:
        _compare_steps(args)
        return
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
    parser.add_argument("--model", help="compare steps of this model instead")
    parser.add_argument("--rows", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--tokens", type=int, default=100, help="of output a request (default 100)")
    parser.add_argument("--runs", type=int, default=7)
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


def _compare_steps(args: argparse.Namespace) -> None:
    for world_size in args.tp:
        config = build_config(
            {
                "engine": {
                    "model": args.model,
                    "tensor_parallel_size": world_size,
                    "max_model_len": PROMPT + args.tokens,
                    "max_num_seqs": args.rows,
                }
            },
            source="bench",
        )
        seconds: dict[str, list[float]] = {}
        texts = []
        with ExitStack() as stack:
            instances = {}
            for way, switch in (("gloo", "0"), ("shared", "1")):
                os.environ["MSTAR_TP_SHARED_MEMORY"] = switch  # the ranks inherit it
                instances[way] = stack.enter_context(Instance(config, timeout_s=600))
                _generate(instances[way], args)
            for _ in range(args.runs):
                for way, instance in instances.items():
                    begin = time.perf_counter()
                    texts.append(_generate(instance, args))
                    seconds.setdefault(way, []).append(time.perf_counter() - begin)
        slow, fast = (1e3 * median(each) / args.tokens for each in seconds.values())
        same = all(text == texts[0] for text in texts)
        print(
            f"tp {world_size}: a step takes {slow:.2f} ms over gloo, {fast:.2f} ms over shared "
            f"memory ({slow / fast:.2f} times), texts {'equal' if same else 'DIFFER'}, load "
            f"{os.getloadavg()[0]:.1f}",
            flush=True,
        )


def _generate(instance: Instance, args: argparse.Namespace) -> list[list[int]]:
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    prompts = [range(3 + row, 3 + row + PROMPT) for row in range(args.rows)]
    return [answer.ids for answer in instance.generate([(p, params, None) for p in prompts])]


if __name__ == "__main__":
    main()
