#!/usr/bin/env python3
"""Compile every Triton kernel ahead of time, without a GPU, and print what it takes of one.

    python scripts/compile_kernels.py [--arch 80 90 100] [--dtype float16 bfloat16 float32]
        [--kernel NAME] [--json]

A line for each kernel, launch and architecture: registers a thread, bytes of shared memory a block,
bytes spilled to local memory. Exit status 1 where something spills or does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys

from mstar_tp.kernels.triton.case import DTYPES
from mstar_tp.kernels.triton.compile import ARCHITECTURES, Compiled, compile_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--kernel", default="", help="only those whose name has this in it")
    parser.add_argument("--json", action="store_true", help="one JSON array")
    options = parser.parse_args()
    found: list[Compiled] = []
    if not options.json:
        print(f"{'kernel':<44} {'dtype':<9} {'sm':>4} {'regs':>5} {'shared':>7} {'spilled':>8}")
    for one in compile_cases(options.arch, options.dtype, options.kernel):
        found.append(one)
        if not options.json:
            print(
                f"{one.name:<44} {one.dtype:<9} {one.arch:>4} {one.registers:>5} "
                f"{one.shared_bytes:>7} {one.spilled_bytes:>8}",
                flush=True,
            )
    if options.json:
        print(json.dumps([one._asdict() for one in found], indent=1))
    return 1 if any(one.problem for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
