"""``mstar-tp bench prefix``: the time to a first token behind a long prefix.

The prefix is one that nobody asked before, and then the same one with another end.

One request at a time, the two kinds in turn, on the base and on an adapter. No prefix is asked in
more than one run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.load import Ask, Outcome
from mstar_tp.bench.models import SHAPES, make_adapters, make_model
from mstar_tp.bench.report import Report, Table, ratio
from mstar_tp.bench.serving import OURS, PEER, HttpTarget
from mstar_tp.testing.server import Server

COLUMNS = (
    *("who", "model", "prefix", "new TTFT ms", "cached TTFT ms", "cached / new"),
    *("tokens cached", "errors"),
)
TAIL_TOKENS = 8
BASE, ADAPTER = "base", "lora-00"


def bench_prefix(args: argparse.Namespace) -> Report:
    """Measure what the flags ask for.

    Raises:
        MstarError: the server does not start.
    """
    report = new_report("prefix", args.argv)
    longest = max(args.prefix_tokens) + 2 * TAIL_TOKENS + args.max_tokens
    table = Table(title=f"one request at a time, {args.runs} runs", columns=COLUMNS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mstar-bench-")))
        shape = SHAPES[args.size]
        make_model(folder / "model", shape)
        adapters = make_adapters(folder / "adapters", shape, 1, args.rank)
        flags = [str(folder / "model"), "--tp", str(args.tp), "--served-model-name", BASE]
        flags += ["--max-model-len", str(longest)]
        flags += [word for item in adapters.items() for word in ("--lora", "=".join(item))]
        server = stack.enter_context(Server(*flags))
        targets = {OURS: HttpTarget(server.url, args.api_key, args.timeout)}
        if args.peer_url:
            targets[PEER] = HttpTarget(args.peer_url, args.api_key, args.timeout)
        names = (BASE, *adapters)
        for prefix_tokens in args.prefix_tokens:
            for name in names:
                found = asyncio.run(_measure(args, targets, name, prefix_tokens))
                for who, (new, cached) in found.items():
                    table.add(who, name, prefix_tokens, *_row(new, cached))
                    report.failed += sum(each.error is not None for each in (*new, *cached))
    report.tables.append(table)
    return report


_Pairs = tuple[list[Outcome], list[Outcome]]


async def _measure(
    args: argparse.Namespace, targets: Mapping[str, HttpTarget], name: str, prefix_tokens: int
) -> dict[str, _Pairs]:
    """The first run of each target warms up, and is not among what is found."""
    found: dict[str, _Pairs] = {who: ([], []) for who in targets}
    draw = random.Random(f"{args.seed} {name} {prefix_tokens}")

    def ids(count: int) -> list[int]:
        return [draw.randrange(300, 2000) for _ in range(count)]

    for number in range(-1, args.runs):
        prefix = ids(prefix_tokens)
        prompts = [prefix + ids(TAIL_TOKENS) for _ in range(2)]
        for who, target in targets.items():
            async with target.client() as client:
                for prompt, into in zip(prompts, found[who], strict=True):
                    ask = Ask(model=target.names.get(name, name), prompt=prompt, at_s=0)
                    outcome = await client.complete(ask, args.max_tokens)
                    if number >= 0:
                        into.append(outcome)
    return found


def _row(new: Sequence[Outcome], cached: Sequence[Outcome]) -> tuple[float | int | None, ...]:
    times = [
        [1e3 * (each.pieces_s[0] - each.sent_s) for each in kind if each.pieces_s]
        for kind in (new, cached)
    ]
    told = [each.cached_tokens for each in cached if each.cached_tokens is not None]
    medians = [median(kind) if kind else None for kind in times]
    errors = sum(each.error is not None for each in (*new, *cached))
    return *medians, ratio(times[1], times[0]), median(told) if told else None, errors
