#!/usr/bin/env python3
"""The gain of planning each step while the one before it runs: decode steps with and without.

    python scripts/bench_overlap.py MODEL_DIR --rows 8 --tokens 300 --runs 5
    python scripts/bench_overlap.py MODEL_DIR --tp 2 --lora a=PATH --lora b=PATH

Real rank processes, driven without HTTP. Both ways are up at once and measured in turn, run by run;
the figures are medians over the runs.

    step ms    wall time of a run / its tokens a row (prefill and waking up are in it)
    gap us     from the end of one forward to the start of the next, on the leader: sampling, commit
               and, without overlap, sending tokens, planning and announcing too
    tokens/s   of all rows
    texts      whether both ways gave the same tokens in every run
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import support_path  # noqa: F401  # tests/support becomes importable
from rich.console import Console
from rich.table import Table
from support.instance import Instance

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

WAYS = {"off": False, "on": True}


@dataclass(slots=True)
class Runs:
    """The measurements of one way, run by run."""

    seconds: list[float] = field(default_factory=list)
    gaps_us: list[int] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    adapters = dict(item.split("=", 1) for item in args.lora)
    runs = {way: Runs() for way in WAYS}
    with ExitStack() as stack:
        instances = {
            way: stack.enter_context(Instance(_config(args, adapters, overlap), timeout_s=600))
            for way, overlap in WAYS.items()
        }
        for instance in instances.values():
            _run(instance, args, list(adapters), Runs())
        for number in range(args.runs):
            order = list(WAYS) if number % 2 else list(reversed(WAYS))
            for way in order:
                _run(instances[way], args, list(adapters), runs[way])
    _report(args, runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the base model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rows", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--tokens", type=int, default=300, help="of output a request (default 300)")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead")
    return parser.parse_args()


def _config(args: argparse.Namespace, adapters: dict[str, str], overlap: bool) -> ServeConfig:
    engine = {
        "model": args.model,
        "tensor_parallel_size": args.tp,
        "dtype": args.dtype,
        "threads": args.threads,
        "max_model_len": args.prompt_tokens + args.tokens,
        "async_scheduling": overlap,
        "lora": {"adapters": adapters, "max_loras": max(1, len(adapters))} if adapters else None,
    }
    return build_config({"engine": engine}, source="bench")


def _run(instance: Instance, args: argparse.Namespace, names: list[str], runs: Runs) -> None:
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    requests = []
    for row in range(args.rows):
        key = AdapterKey(names[row % len(names)], FIRST_GENERATION) if names else None
        requests.append((range(3 + row, 3 + row + args.prompt_tokens), params, key))
    begin = time.perf_counter()
    answers = instance.generate(requests)
    runs.seconds.append(time.perf_counter() - begin)
    runs.gaps_us.append(instance.inspect()[0].gap_us)
    assert all(len(answer.ids) == args.tokens for answer in answers)
    runs.tokens.append([answer.ids for answer in answers])


def _report(args: argparse.Namespace, runs: dict[str, Runs]) -> None:
    same = runs["on"].tokens == runs["off"].tokens
    stats = {
        way: {
            "step_ms": round(1e3 * median(run.seconds) / args.tokens, 3),
            "gap_us": median(run.gaps_us),
            "tokens_per_s": round(args.rows * args.tokens / median(run.seconds)),
        }
        for way, run in runs.items()
    }
    if args.json:
        print(json.dumps({"overlap": stats, "texts_equal": same}))
        return
    table = Table("overlap", "step ms", "gap us", "tokens/s")
    for way, row in stats.items():
        table.add_row(way, *(str(value) for value in row.values()))
    Console().print(table)
    print("texts equal" if same else "TEXTS DIFFER")


if __name__ == "__main__":
    main()
