#!/usr/bin/env python3
"""The speed of reading an adapter from the page cache, and its effect on decoding.

    python scripts/bench_read.py read [--mb 100] [--tp 1 2] [--runs 15]
    python scripts/bench_read.py decode MODEL_DIR ADAPTER_DIR... [--tp 1] [--rounds 5]

``read`` loads an adapter as a reader thread does, headers checked, and compares with plain read()
and a copy of the same file, in turn, both into new memory on one thread. Ratios above 1 are faster
than that. ``same`` keeps the file's dtype, ``cast`` makes float32 into bfloat16.

    wall, cpu   plain / load, medians over the runs
    held ms     how long the interpreter was not to be had while loads ran, by a thread that asks
                for it all the time; waiting for a core is not counted

``decode`` decodes a row on each of the first 8 adapters on real ranks, in turn with and without a
stream of requests on the others, which are read but find no slot, and compares the times between
tokens; "read" is what rank 0 read meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import support_path  # noqa: F401  # tests/support becomes importable
import torch
from safetensors.torch import save_file
from support.instance import Instance

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.lora.format.batch_checks import AdapterChecker
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import read_adapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import random_pairs, tiny_spec
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import Abort
from mstar_tp.wire.reports import RankReport, Tokens
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

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
        page_locked=False,
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


# ------------------------------------------------------------------ decoding meanwhile

ROWS = 8
REQUEST_S = 0.2
"""A request on another adapter lives this long: its read goes on, and the next waits for it."""


class TimedInstance(Instance):
    """Notes when each request's tokens come."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config, timeout_s=600)
        self.arrivals: dict[int, list[float]] = {}

    def _take(self, rank: int, report: RankReport | Lost) -> None:
        if isinstance(report, Tokens):
            now = time.perf_counter()
            for token in report.tokens:
                self.arrivals.setdefault(token.rid, []).append(now)
        super()._take(rank, report)

    @property
    def bytes_read(self) -> int:
        """The bytes that rank 0 has read since it started."""
        text = Path(f"/proc/{self.ranks.processes[0].pid}/io").read_text()
        return int(text.split("rchar:")[1].split()[0])


def bench_decode(args: argparse.Namespace) -> None:
    names = [f"lora-{number:02}" for number in range(len(args.adapters))]
    engine = {
        "model": args.model,
        "tensor_parallel_size": args.tp,
        "max_model_len": 32 + args.tokens,
        "lora": {
            "adapters": dict(zip(names, args.adapters, strict=True)),
            "max_loras": ROWS,
            "max_cpu_loras": ROWS + 1,
        },
    }
    gaps: dict[bool, list[float]] = {False: [], True: []}
    ratios, rates = [], []
    with TimedInstance(build_config({"engine": engine}, source="bench")) as instance:
        decode(instance, names, args.tokens, loading=False)
        for number in range(args.rounds):
            found: dict[bool, list[float]] = {}
            for loading in (False, True) if number % 2 else (True, False):
                found[loading], rate = decode(instance, names, args.tokens, loading)
                gaps[loading] += found[loading]
                rates += [rate] if loading else []
            ratios.append(percentile(found[True], 0.95) / percentile(found[False], 0.95))
    for loading, what in ((False, "quiet"), (True, "loading")):
        shares = [f"p{share:.0%}"[:-1] + f" {1e3 * percentile(gaps[loading], share):.1f} ms"
                  for share in (0.5, 0.95, 0.99)]  # fmt: skip
        print(f"{what:8}", *shares)
    whole = percentile(gaps[True], 0.95) / percentile(gaps[False], 0.95)
    print(f"p95 loading / quiet: {whole:.2f} of all, {median(ratios):.2f} median of the rounds")
    print(f"read {median(rates) / 1e6:.0f} MB/s")


def decode(
    instance: TimedInstance, names: Sequence[str], num_tokens: int, loading: bool
) -> tuple[list[float], float]:
    """(seconds between tokens of a row, bytes read a second) while all rows decode."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0)
    keys = [AdapterKey(name, FIRST_GENERATION) for name in names]
    rids = [instance.submit(range(3, 19), params, key) for key in keys[:ROWS]]
    while any(not instance.arrivals.get(rid) for rid in rids):
        time.sleep(REQUEST_S)
    begun, before = time.perf_counter(), instance.bytes_read
    turn = 0
    while all(len(instance.arrivals[rid]) < num_tokens - 2 for rid in rids):
        if loading:
            other = keys[ROWS + turn % (len(keys) - ROWS)]
            rid = instance.submit(range(3, 19), params, other)
        time.sleep(REQUEST_S)
        if loading:
            instance.send(Abort(rid=rid))
        turn += 1
    ended = time.perf_counter()
    rate = (instance.bytes_read - before) / (ended - begun)
    for rid in rids:
        instance.result(rid)
    times = [[at for at in instance.arrivals[rid] if begun <= at <= ended] for rid in rids]
    return [b - a for row in times for a, b in itertools.pairwise(row)], rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(required=True)
    read = parts.add_parser("read", help="against plain read() and a copy")
    read.add_argument("--mb", type=int, default=100)
    read.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    read.add_argument("--runs", type=int, default=15)
    read.set_defaults(run=bench_read)
    decoding = parts.add_parser("decode", help="the times between tokens while others are read")
    decoding.add_argument("model")
    decoding.add_argument("adapters", nargs="+", help=f"folders, more than {ROWS}")
    decoding.add_argument("--tp", type=int, default=1)
    decoding.add_argument("--tokens", type=int, default=100)
    decoding.add_argument("--rounds", type=int, default=5)
    decoding.set_defaults(run=bench_decode)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
