#!/usr/bin/env python3
"""The cost of moving a preempted request's KV to host memory and back, and of computing it again.

    python scripts/bench_kv_offload.py MODEL_DIR
    python scripts/bench_kv_offload.py MODEL_DIR --tokens 16,256 --rows 16 --output 200 --runs 3

First table: one request of so many tokens, one rank, no other row in its steps. Its KV goes to host
memory and comes back (``out``, ``back``), or is computed again in steps of as many tokens as the
server's; medians of the runs.

Second table: as many requests at once as there are rows, with pages for a part of them, with room
in host memory for all and for none; real ranks without HTTP, both up at once and measured in turn.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median

import support_path  # noqa: F401  # tests/support becomes importable
import torch
from rich.console import Console
from rich.table import Table
from support.instance import Instance
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, ServeConfig, build_config
from mstar_tp.wire.values import SamplingParams

PAGE_SIZE = 16
LENGTHS = "1,16,64,256,1024"
ROOM_FOR_ALL_GIB = 2.0


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    _moves(args)
    _serving(args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the base model")
    parser.add_argument("--tokens", default=LENGTHS, help=f"first table (default {LENGTHS})")
    parser.add_argument("--rows", type=int, default=16, help="second table (default 16)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--output", type=int, default=128, help="tokens (default 128)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="pages there are of those needed (default 0.5)"
    )
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def _moves(args: argparse.Namespace) -> None:
    lengths = [int(n) for n in args.tokens.split(",")]
    config = EngineConfig(
        model=args.model,
        max_model_len=max(lengths) + 1,
        max_num_seqs=2,
        block_size=PAGE_SIZE,
        num_kv_pages=2 * -(-max(lengths) // PAGE_SIZE) + 1,
        kv_offloading_size=ROOM_FOR_ALL_GIB,
    )
    ranks = LockstepRanks(config)
    table = Table("tokens", "KV bytes", "out ms", "back ms", "computed again ms", "ratio")
    try:
        for length in lengths:
            bytes_, out, back, again = _measure(ranks, length, config.step_tokens("cpu"), args.runs)
            ratio = again / (out + back)
            row = (length, bytes_, *(f"{1e3 * x:.2f}" for x in (out, back, again)), f"{ratio:.0f}")
            table.add_row(*map(str, row))
    finally:
        ranks.close()
    Console().print(table)


def _measure(
    ranks: LockstepRanks, length: int, chunk: int, runs: int
) -> tuple[int, float, float, float]:
    """Bytes moved, and seconds: out, back, computed again."""
    state, kv = ranks.states[0], ranks.engines[0].kv
    rid = ranks.open(range(3, 3 + length), SamplingParams(max_tokens=1, temperature=0))
    request = state.requests[rid]
    seconds: list[tuple[float, float, float]] = []
    moved = 0
    for _ in range(runs + 1):
        begin = time.perf_counter()
        for first in range(0, length, chunk):
            ranks.step([(rid, min(chunk, length - first))])
        again = time.perf_counter() - begin
        before = kv.kept.state().offloaded_bytes
        state.preempt(rid, offload=True)
        begin = time.perf_counter()
        kv.kept.copy_out()
        out = time.perf_counter() - begin
        assert kv.table.try_grow(rid, request.computed) is not None
        begin = time.perf_counter()
        kv.reload([rid])
        back = time.perf_counter() - begin
        moved = kv.kept.state().offloaded_bytes - before
        state.preempt(rid)
        # As it was before it sampled its only token.
        request.ended, request.ended_by = None, -1
        del request.tokens[length:]
        seconds.append((out, back, again))
    state.remove(rid)
    # The first run warms up.
    out, back, again = (median(column) for column in zip(*seconds[1:], strict=True))
    return moved, out, back, again


def _serving(args: argparse.Namespace) -> None:
    ways = {"room for all": ROOM_FOR_ALL_GIB, "none": 0.0}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        instances = {
            way: stack.enter_context(Instance(_config(args, size), timeout_s=600))
            for way, size in ways.items()
        }
        for number in range(args.runs + 1):
            for way in sorted(ways, reverse=bool(number % 2)):
                begin = time.perf_counter()
                answers = instances[way].generate(_requests(args))
                if number:  # the first run warms up
                    seconds[way].append(time.perf_counter() - begin)
                texts[way] = [answer.ids for answer in answers]
        states = {way: instance.inspect()[0] for way, instance in instances.items()}
    table = Table("host memory", "tokens/s", "preempted", "offloaded", "tokens computed again")
    for way, state in states.items():
        rate = args.rows * args.output / median(seconds[way])
        runs = args.runs + 1
        stats = state.preemptions, state.kv_host.offloads, state.kv_host.recomputed_tokens
        table.add_row(way, f"{rate:.0f}", *(str(round(x / runs)) for x in stats))
    Console().print(table)
    first, other = texts.values()
    print("texts equal" if first == other else "TEXTS DIFFER")


def _requests(args: argparse.Namespace) -> list[tuple[range, SamplingParams, None]]:
    params = SamplingParams(max_tokens=args.output, temperature=0)
    return [(range(3 + row, 3 + row + args.prompt), params, None) for row in range(args.rows)]


def _config(args: argparse.Namespace, host_gib: float) -> ServeConfig:
    length = args.prompt + args.output
    engine = {
        "model": args.model,
        "max_model_len": length,
        "max_num_seqs": args.rows,
        "block_size": PAGE_SIZE,
        "num_kv_pages": int(args.share * args.rows * -(-length // PAGE_SIZE)),
        "kv_offloading_size": host_gib,
    }
    return build_config({"engine": engine}, source="bench")


if __name__ == "__main__":
    main()
