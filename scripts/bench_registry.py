"""What thousands of registered adapters cost: memory, time to register, and time of a step.

    python scripts/bench_registry.py                  # 10 against 10,000 adapters, tp 2, tiny model
    python scripts/bench_registry.py --many 2000 --like no

Starts real servers on a small random model. Memory is resident memory of each process, from /proc.
Two servers, one with few adapters and one with many, are measured in turn, so that a machine whose
speed drifts slows both. ``--like yes`` makes all adapters by one recipe (same settings and header,
as a fleet has), ``no`` gives each a header that is not remembered: every check is a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
import yaml
from safetensors.torch import load_file, save_file

from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.checks import KNOWN_RECIPES
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.testing.processes import family, ranks
from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.messages import AdapterKey, CopyIn

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
SLOTS = 8
ROWS = 64
"""Rows of a step whose admit is timed."""
ADMITS = 2000
WARM_UP_LOADS = 200


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-registry-") as folder:
        fleet = Fleet(Path(folder), args)
        _print_admits(fleet)
        _print_servers(fleet)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="of the model, so of each adapter")
    parser.add_argument("--like", choices=("yes", "no"), default="yes")
    parser.add_argument("--rounds", type=int, default=7, help="of the step times (median)")
    parser.add_argument("--clients", type=int, default=16, help="that load at once at run time")
    args = parser.parse_args()
    if args.few < SLOTS:
        parser.error(f"--few: wanted at least {SLOTS}: that many are used in one step")
    return args


class Fleet:
    """A model and folders of adapters; files are linked, so ten thousand take little disk."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = folder
        self.model = make_tiny_model(folder / "model", "llama", num_hidden_layers=args.layers)
        _write_tokenizer(self.model)
        first = make_adapter(folder / "made", self.model, rank=8, seed=0)
        self._kinds = [first]
        for number in range(0 if args.like == "yes" else 2 * KNOWN_RECIPES):
            kind = folder / f"kind-{number}"
            kind.mkdir()
            os.link(first / CONFIG, kind / CONFIG)
            save_file(load_file(first / WEIGHTS), kind / WEIGHTS, {"kind": str(number)})
            self._kinds.append(kind)

    def adapters(self, prefix: str, count: int) -> dict[str, str]:
        """name -> folder of adapters that exist from now on."""
        found: dict[str, str] = {}
        for number in range(count):
            name, kind = f"{prefix}-{number:05}", self._kinds[number % len(self._kinds)]
            home = self.folder / "adapters" / name
            home.mkdir(parents=True)
            for file in (CONFIG, WEIGHTS):
                os.link(kind / file, home / file)
            found[name] = str(home)
        return found

    def config(self, adapters: dict[str, str]) -> Path:
        """A serving configuration with these adapters."""
        path = self.folder / f"serve-{len(adapters)}.yaml"
        lora = {
            "adapters": adapters,
            "max_loras": SLOTS,
            "roots": [str(self.folder / "adapters")],
        }
        engine = {
            "model": str(self.model),
            "tensor_parallel_size": self.args.tp,
            "max_model_len": 256,
            "max_num_seqs": SLOTS,
            "lora": lora,
        }
        server = {"port": 0, "served_model_name": ["base"]}
        path.write_text(yaml.safe_dump({"engine": engine, "server": server}), encoding="utf-8")
        return path


def _write_tokenizer(model: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )


# ------------------------------------------------------------------ one rank's admit, in process


def _print_admits(fleet: Fleet) -> None:
    """Microseconds of a thread's time that a steady admit takes, with few and with many."""
    few, many = (_AdmitTimer(fleet, count) for count in (fleet.args.few, fleet.args.many))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(fleet.args.rounds):
        for timer, found in zip((few, many), times, strict=True):
            found.append(timer.steady_us())
    low, high = (min(found) for found in times)
    print(f"| steady admit, {ROWS} rows, us | {low:.2f} | {high:.2f} | {high / low:.2f} |")
    few.close()
    many.close()


class _AdmitTimer:
    """A pool of one rank with ``count`` adapters; all rows of its step hold their slots."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self.spec: LoraSpec = tiny_spec(slots=SLOTS, cpu_capacity=2 * SLOTS)
        folder = fleet.folder / f"pool-{count}"
        path = str(write_adapter(folder, random_pairs(self.spec, rank=2, seed=0)))
        reports: list[CopyIn] = []
        self.pool = LoraAdapterPool(
            self.spec,
            device="cpu",
            groups=JointGroups(SingleGroup()),
            dtype=torch.float32,
            decides=True,
            report=reports.append,
        )
        keys = [AdapterKey(f"a{number}", 0) for number in range(count)]
        self.pool.preload([(key, path) for key in keys])
        for rid in range(ROWS):
            self.pool.ingest_request(rid, LoraReqConfig(keys[rid % SLOTS]))
        rows = tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in range(ROWS))
        self.steps = [StepBatch(tp_seq=seq, rows=rows) for seq in range(2)]
        outcome = self.pool.admit(self.steps[0])
        assert not outcome.failed and outcome.refused is None, outcome
        self.pool.commit(self.steps[0])

    def steady_us(self) -> float:
        start = time.thread_time()  # of this thread alone, whatever else runs
        for _ in range(ADMITS):
            self.pool.admit(self.steps[1])
            self.pool.commit(self.steps[1])
        return (time.thread_time() - start) / ADMITS * 1e6

    def close(self) -> None:
        self.pool.close()


# ------------------------------------------------------------------ servers


@dataclass(slots=True)
class Served:
    """One running server and what was measured of it."""

    server: Server
    names: list[str]
    start_s: float
    rss: dict[str, int]
    steps_ms: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, fleet: Fleet, adapters: dict[str, str]) -> Served:
        server = Server(str(fleet.config(adapters)))
        start = time.perf_counter()
        server.__enter__()
        took = time.perf_counter() - start
        served = cls(server, list(adapters), took, {})
        try:
            served.step_ms(8)
            served.rss = _resident(server.process.pid)
        except BaseException:
            server.stop()
            raise
        return served

    def step_ms(self, tokens: int) -> float:
        """Mean time of a decode step over ``SLOTS`` rows on as many adapters."""

        def ask(name: str) -> None:
            body = {
                "model": name,
                "prompt": [3] * 16,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=600)
            answer.raise_for_status()

        before, start = self._steps(), time.perf_counter()
        with ThreadPoolExecutor(SLOTS) as pool:
            list(pool.map(ask, self.names[:SLOTS]))
        return (time.perf_counter() - start) / (self._steps() - before) * 1e3

    def _steps(self) -> int:
        state = httpx.get(f"{self.server.url}/debug/state", timeout=600).json()
        return int(state["ranks"][0]["steps"])

    def load(self, adapters: dict[str, str], clients: int) -> float:
        """Seconds that loading all of them takes, ``clients`` at once."""
        with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=clients)) as http:

            def one(item: tuple[str, str]) -> None:
                body = {"lora_name": item[0], "lora_path": item[1]}
                http.post(f"{self.server.url}/v1/load_lora_adapter", json=body).raise_for_status()

            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(one, adapters.items()))
            return time.perf_counter() - start


def _print_servers(fleet: Fleet) -> None:
    args = fleet.args
    few = Served.start(fleet, fleet.adapters("few", args.few))
    try:
        many = Served.start(fleet, fleet.adapters("many", args.many))
        try:
            _compare_steps((few, many), args.rounds)
            _print_row("step of 8 rows on 8 adapters, ms", few.steps_ms, many.steps_ms)
            print(f"| start, s | {few.start_s:.1f} | {many.start_s:.1f} | |")
            print(f"bytes of resident memory for each of {args.many} adapters from the start:")
            _print_memory(few.rss, many.rss, args.many - args.few)
        finally:
            many.server.stop()
        # What the first loads and steps take once is no adapter's cost.
        few.load(fleet.adapters("first", WARM_UP_LOADS), args.clients)
        few.step_ms(64)
        before, added = _resident(few.server.process.pid), fleet.adapters("late", args.many)
        took = few.load(added, args.clients)
        print(f"{args.many} loads at run time: {took:.1f} s, {args.many / took:.0f} a second")
        few.step_ms(64)
        print(f"bytes of resident memory for each of {args.many} adapters loaded at run time:")
        _print_memory(before, _resident(few.server.process.pid), args.many)
    finally:
        few.server.stop()


def _compare_steps(servers: Sequence[Served], rounds: int) -> None:
    for _ in range(rounds):
        for served in servers:
            served.steps_ms.append(served.step_ms(64))


def _print_row(what: str, few: Sequence[float], many: Sequence[float]) -> None:
    low, high = statistics.median(few), statistics.median(many)
    print(f"| {what} | {low:.2f} | {high:.2f} | {high / low:.2f} |")


def _print_memory(before: dict[str, int], after: dict[str, int], count: int) -> None:
    for process, start in sorted(before.items()):
        grown = after[process] - start
        print(f"  {process}: {grown / count:,.0f} ({start >> 20} -> {after[process] >> 20} MiB)")


def _resident(pid: int) -> dict[str, int]:
    """Resident bytes of the frontend and of each rank, by what they are. Ranks share what was
    imported before they were forked; it counts in each.
    """
    found: dict[str, int] = {}
    for process in [family(pid)[0], *ranks(pid)]:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        name = "frontend" if process.rank is None else f"rank {process.rank}"
        found[name] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


if __name__ == "__main__":
    main()
