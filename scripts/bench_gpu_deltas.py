#!/usr/bin/env python3
"""Time the Triton LoRA kernels on a CUDA device against the bytes they must move.

    python scripts/bench_gpu_deltas.py [--dtype bfloat16] [--json]

For each cell (rows, adapters, rank, hidden size): the median microseconds of one replayed graph of
one target's delta, the bytes that any way must move (each live slot's A and B once, x and y), their
share of the copy bandwidth measured in the same run, and torch's GEMMs slot by slot beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from mstar_tp.lora.tiles import TileBuffer, TileSizes
from mstar_tp.testing.delta_cases import DeltaCase, DeltaShape, rows_by_slot

CELLS = [
    (rows, adapters, rank)
    for rows in (1, 8, 64, 256, 2048)
    for adapters in (1, 8, 32, 64)
    for rank in (8, 16, 64, 128)
    if adapters <= rows
]
REPEATS = 20
INNER = 20


def median_us(call: Callable[[], object]) -> float:
    """Median over replays of a graph that runs ``call`` several times."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(INNER):
            call()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / INNER)
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source)) / 1000


def torch_way(case: DeltaCase, slots: list[int], x: torch.Tensor, y: torch.Tensor) -> None:
    for slot, rows in rows_by_slot(slots).items():
        part = slice(rows[0], rows[-1] + 1)
        y[part].addmm_(x[part] @ case.a[slot - 1].t(), case.b[slot - 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time", file=sys.stderr)
        return 1
    dtype, device = getattr(torch, options.dtype), torch.device("cuda")
    ceiling = copy_gb_per_s()
    found: list[dict[str, float | int | str]] = []
    for hidden in options.hidden:
        for num_rows, adapters, rank in CELLS:
            shape = DeltaShape(
                in_features=hidden,
                out_sizes=(hidden,),
                max_rank=rank,
                ranks=(rank,) * adapters,
                dtype=dtype,
            )
            case = DeltaCase(shape, device, 0)
            slots = sorted(1 + row % adapters for row in range(num_rows))
            x, y = case.rows(num_rows)
            # A cold cache in every call would need many slots' worth of memory: weights that fit
            # the L2 cache are read from there by both ways alike.
            rows = TileBuffer(TileSizes.of(num_rows, adapters), device).fill(rows_by_slot(slots))

            def ours(case: DeltaCase = case, x=x, y=y, rows=rows) -> None:  # type: ignore[no-untyped-def]
                torch.ops.mstar_lora.apply(
                    y,
                    x,
                    case.a,
                    case.b,
                    rows.order_R,
                    rows.tiles_N3,
                    case.ranks,
                    case.blocks,
                    rows.block_rows,
                    False,
                )

            moved = case.a.nbytes + case.b.nbytes + x.nbytes + 2 * y.nbytes
            took = median_us(ours)
            beside = median_us(lambda c=case, s=slots, x=x, y=y: torch_way(c, s, x, y))
            rate = moved / took / 1000
            found.append(
                {
                    "hidden": hidden,
                    "rows": num_rows,
                    "adapters": adapters,
                    "rank": rank,
                    "us": round(took, 2),
                    "bytes": moved,
                    "share_of_copy": round(rate / ceiling, 3),
                    "torch_us": round(beside, 2),
                }
            )
            if not options.json:
                print(" ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    if options.json:
        name = torch.cuda.get_device_name()
        print(json.dumps({"device": name, "copy_gb_per_s": ceiling, "cells": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
