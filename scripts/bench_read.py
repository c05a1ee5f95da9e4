#!/usr/bin/env python3
"""How fast an adapter is read from the page cache, and what its reading does to who decodes.

    python scripts/bench_read.py read [--mb 100] [--tp 1 2] [--runs 15]
    python scripts/bench_read.py decode MODEL_DIR ADAPTER_DIR... [--tp 1] [--rounds 5]

``read`` loads an adapter as a reader thread does, headers checked, and compares with plain read()
and a copy of the same file, in turn, both into new memory on one thread. Ratios above 1 are faster
than that. ``same`` keeps the file's dtype, ``cast`` makes float32 into bfloat16.

    wall, cpu   plain / load, medians over the runs
    held ms     how long the interpreter was not to be had while loads ran, by a thread that asks
                for it all the time; waiting for a core is not counted

``decode`` decodes 8 rows on real ranks, in turn with and without a stream of requests on other
adapters that are read but find no slot, and compares the times between tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.checks import AdapterChecker
from mstar_tp.lora.shards import read_adapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import random_pairs, tiny_spec
from mstar_tp.wire.messages import FIRST_GENERATION, AdapterKey

RANK = 32
PAUSE_S = 0.15
"""Between watched loads: under a real-time priority the system stops who never rests."""
SHAPE = {"hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "inner": 8192}
"""A model of a billion parameters, but for its number of layers."""


def make_adapter(folder: Path, mb: int, dtype: torch.dtype) -> tuple[LoraSpec, Path]:
    """A random adapter of about ``mb`` megabytes on all seven linears, and the spec it fits."""
    one = tiny_spec(**SHAPE, layers=1, max_rank=RANK)
    layer = sum(t.numel() for t in random_pairs(one, rank=RANK, seed=0).values()) * dtype.itemsize
    spec = tiny_spec(**SHAPE, layers=max(1, round(mb * 1e6 / layer)), max_rank=RANK)
    tensors = {
        key: tensor * 0.01
        for key, tensor in random_pairs(spec, rank=RANK, seed=0, dtype=dtype).items()
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return spec, folder


def plain(path: Path) -> torch.Tensor:
    """read() and a copy."""
    with open(path, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    return data


def load(
    checker: AdapterChecker,
    spec: LoraSpec,
    folder: Path,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
) -> LoadedAdapter:
    return read_adapter(
        spec,
        AdapterKey("x", FIRST_GENERATION),
        checker.check("x", folder),
        rank=rank,
        world_size=world_size,
        dtype=dtype,
        pin=False,
    )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, this thread's CPU) seconds."""
    wall, cpu = time.perf_counter(), time.thread_time()
    kept = work()
    took = time.perf_counter() - wall, time.thread_time() - cpu
    del kept
    return took


class Watcher:
    """A thread that lets the interpreter go and takes it again, all the time."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        release = ctypes.CDLL(None).getppid  # ctypes lets the interpreter go around a call
        queued = open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", buffering=0)
        with queued:
            while not self._stop.is_set():
                begun, cpu = time.perf_counter(), time.thread_time()
                before = _run_delay(queued.fileno())
                release()
                wall = time.perf_counter() - begun
                core = _run_delay(queued.fileno()) - before
                self.waits.append(wall - core - (time.thread_time() - cpu))


def _run_delay(fd: int) -> float:
    """Seconds a thread has waited for a core."""
    return int(os.pread(fd, 64, 0).split()[1]) * 1e-9


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def bench_read(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # as ranks set it
    kinds = (("same", torch.bfloat16, torch.bfloat16), ("cast", torch.float32, torch.bfloat16))
    print(f"{'kind':6}{'tp':>3}{'rank':>5}{'MB':>7}{'plain ms':>10}{'load ms':>9}{'wall':>7}"
          f"{'cpu':>7}{'held p99.9 ms':>15}{'max ms':>8}")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for kind, stored, served in kinds:
            spec, folder = make_adapter(Path(scratch, kind), args.mb, stored)
            weights = folder / "adapter_model.safetensors"
            for tp in args.tp:
                for rank in range(tp):
                    row = measure(spec, folder, rank, tp, served, args.runs)
                    size = weights.stat().st_size / 1e6
                    print(f"{kind:6}{tp:3}{rank:5}{size:7.0f}" + row, flush=True)


def measure(spec: LoraSpec, folder: Path, rank: int, tp: int, dtype: torch.dtype, runs: int) -> str:
    weights = folder / "adapter_model.safetensors"
    checker = AdapterChecker(spec)  # has checked it once, when it was registered
    reads = (lambda: plain(weights)), (lambda: load(checker, spec, folder, rank, tp, dtype))
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for number in range(runs + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(timed(reads[which]))
    walls, cpus = ([median(t[n] for t in kind[1:]) for kind in times] for n in (0, 1))
    waits: list[float] = []
    for _ in range(runs):
        with Watcher() as watcher:
            load(checker, spec, folder, rank, tp, dtype)
        waits += watcher.waits
        time.sleep(PAUSE_S)
    held = f"{1e3 * percentile(waits, 0.999):15.2f}{1e3 * max(waits):8.2f}"
    return (f"{1e3 * walls[0]:10.1f}{1e3 * walls[1]:9.1f}{walls[0] / walls[1]:7.2f}"
            f"{cpus[0] / cpus[1]:7.2f}" + held)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(required=True)
    read = parts.add_parser("read", help="against plain read() and a copy")
    read.add_argument("--mb", type=int, default=100)
    read.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    read.add_argument("--runs", type=int, default=15)
    read.set_defaults(run=bench_read)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
