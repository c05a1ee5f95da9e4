"""Load thousands of damaged adapters into two ranks and say what was not refused clearly.

Nothing may crash, hang, be left behind on a rank, or be refused in words that only the code
understands. Exits 1 if anything is wrong; each find names the seed that makes it again.

    python scripts/fuzz_adapters.py [--count 5000] [--seed 0] [--folder KEEP_IT_HERE] [--show]
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import support_path  # noqa: F401  # tests/support becomes importable
import torch
from support.adapter_fuzz import AdapterFuzzer

SLOW_S = 5.0
MEMORY_BYTES = 8 << 30


def fuzz(folder: Path, first: int, count: int, show: bool) -> int:
    """Run ``count`` seeds; how many went wrong."""
    fuzzer = AdapterFuzzer(folder)
    wrong, slowest, slowest_seed = 0, 0.0, first
    refused: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    try:
        for seed in range(first, first + count):
            begun = time.perf_counter()
            try:
                outcome = fuzzer.run(seed)
            except Exception as error:  # whatever it is, it is a find
                wrong += 1
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                fuzzer.close()
                folder = Path(tempfile.mkdtemp(dir=folder.parent))
                fuzzer = AdapterFuzzer(folder)
                continue
            took = time.perf_counter() - begun
            if took > slowest:
                slowest, slowest_seed = took, seed
            if took > SLOW_S:
                wrong += 1
                print(f"seed {seed}: took {took:.1f} s: {outcome.damage}", flush=True)
            kinds = refused if outcome.cause is not None else loaded
            kinds.update(outcome.damage.names)
            if show:
                print(f"{seed} {' + '.join(outcome.damage.names)}: {outcome.cause}")
    finally:
        fuzzer.close()
    for kind in sorted(refused | loaded):
        print(f"{kind:40} refused {refused[kind]:6} loaded {loaded[kind]:6}")
    print(
        f"{count} adapters, {wrong} wrong; the slowest took {slowest:.2f} s (seed {slowest_seed})"
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--folder", help="an empty folder to work in (default: a temporary one)")
    parser.add_argument("--show", action="store_true", help="print what each adapter came to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or Path(scratch, "fuzz"))
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(1 if fuzz(folder, options.seed, options.count, options.show) else 0)


if __name__ == "__main__":
    main()
