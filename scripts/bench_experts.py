"""CPU time of one expert linear for a step's rows, on one thread, by way of running it.

Rows go to random experts. Three ways: the kernel; a GEMM an expert, whose size (and so its last
bits) depends on where other tokens go; GEMMs of a fixed number of rows, as the server runs many
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.moe import FEW_ROWS, TILE


def best_ms(call: Callable[[], object], seconds: float) -> float:
    call()
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return 1e3 * best


def measure(args: argparse.Namespace, dtype: torch.dtype, num_tokens: int) -> str:
    kernels = cpu_kernels(torch.device("cpu"), dtype)
    assert kernels is not None, "there is no compiler here, so there are no kernels"
    shape = args.experts, 2 * args.inner, args.hidden
    weight = (torch.randn(shape) / args.hidden**0.5).to(dtype)
    chosen = torch.randn(num_tokens, args.experts).topk(args.per_token).indices.flatten()
    counts = chosen.bincount(minlength=args.experts)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    x = torch.randn(len(chosen), args.hidden).to(dtype)
    bounds = indptr.tolist()
    tile, out = (
        torch.zeros(TILE, args.hidden, dtype=dtype),
        torch.empty(TILE, shape[1], dtype=dtype),
    )

    def by_expert() -> None:
        for expert, (first, stop) in enumerate(itertools.pairwise(bounds)):
            if stop > first:
                torch.mm(x[first:stop], weight[expert].t())

    def by_tile() -> None:
        for expert, count in enumerate(counts.tolist()):
            for _ in range(-(-count // TILE)):
                torch.mm(tile, weight[expert].t(), out=out)

    ways = (lambda: kernels.expert_linear(x, weight, indptr), by_expert, by_tile)
    times = " ".join(f"{best_ms(way, args.seconds):10.2f}" for way in ways)
    rows = len(chosen) / int((counts > 0).sum())
    return f"{str(dtype)[6:]:9} {num_tokens:6} {rows:15.1f} {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"the server takes the kernel up to {FEW_ROWS} rows an expert, then tiles of {TILE}")
    print("dtype     tokens rows an expert     kernel  by expert    by tile  (CPU ms, best)")
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in (1, 8, 32, 64, 128, 256, 512):
            print(measure(args, dtype, num_tokens))


if __name__ == "__main__":
    main()
