"""The time that a dead rank holds up a stream: from its SIGKILL to the next token, by phase.

    python scripts/bench_restart.py                     a tiny model, CPU, two ranks, ten kills
    python scripts/bench_restart.py MODEL_DIR --tp 4

One stream runs on an adapter; a follower is killed amid it, again and again. The time is split by
what the server logs: *detect* until the frontend knows, *stop* until the other ranks are gone,
*start* until the new processes have met, *load* until every one has loaded, *re-ingest* until the
next token. Exits with 1 when the median misses the bar (`--bar`, `--detect-bar`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp
import support_path  # noqa: F401  # tests/support becomes importable
from support.processes import ranks

from mstar_tp.testing.server import Server

PHASES = ("detect", "stop", "start", "load", "re-ingest")
MARKS = ("a rank is gone", "the ranks are ended", "every rank is here", "every rank is ready")
"""The line that the frontend logs at the end of each phase but the last."""
QUIET_S = 1.0
"""Seconds of streaming between two kills."""
PATIENCE_S = 120.0


class Restart(NamedTuple):
    """Seconds, by phase."""

    phases: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.phases)


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as folder:
        model, flags = args.model, []
        if model is None:
            model, flags = _tiny(Path(folder))
        server = Server(
            *(str(model), "--served-model-name", "base", "--tp", str(args.tp)),
            *("--max-restarts", "1000", *flags),
            env={"MSTAR_TP_LOG_LEVEL": "INFO"},
        )
        with server:
            found = asyncio.run(_measure(server, args.kills, "a" if flags else "base"))
    _print(found)
    totals, detects = [one.total for one in found], [one.phases[0] for one in found]
    missed = median(totals) >= args.bar or median(detects) >= args.detect_bar
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a model's folder (default: a tiny one)")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--bar", type=float, default=6.0, help="seconds in all, median")
    parser.add_argument("--detect-bar", type=float, default=1.0, help="seconds of detect, median")
    return parser.parse_args()


def _tiny(folder: Path) -> tuple[Path, list[str]]:
    from chaos_world import make_files

    model = make_files(folder, num_weights=3, seed=0)
    adapter = folder / "library" / "weights-0"
    return model, ["--dtype", "float32", "--max-model-len", "512", "--lora", f"a={adapter}"]


async def _measure(server: Server, kills: int, model: str) -> list[Restart]:
    found = []
    async with aiohttp.ClientSession(server.url) as session:
        for _ in range(kills):
            tokens = _stream(session, model)
            quiet_until = time.time() + QUIET_S
            async for at in tokens:
                if at > quiet_until:
                    break
            seen = len(server.log)
            killed_at = time.time()
            ranks(server.process.pid)[-1].send(9)
            async with asyncio.timeout(PATIENCE_S):
                next_at = await _first_after(tokens, server, seen)
            found.append(_split(server.log[seen:], killed_at, next_at))
            await tokens.aclose()
    return found


async def _stream(session: aiohttp.ClientSession, model: str) -> AsyncIterator[float]:
    """The time of each token, of one stream after the other."""
    body = {"model": model, "prompt": [5] * 32, "max_tokens": 400, "stream": True}
    while True:
        async with session.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if "error" in (tree := json.loads(line[6:])):
                        raise SystemExit(f"a stream failed: {tree['error']['message']}")
                    yield time.time()


async def _first_after(tokens: AsyncIterator[float], server: Server, seen: int) -> float:
    """The first token that new ranks made."""
    async for at in tokens:
        if MARKS[-1] in server.log[seen:]:
            return at
    raise SystemExit("the stream ended")


def _split(log: str, killed_at: float, next_at: float) -> Restart:
    times = [killed_at]
    for mark in MARKS:
        found = re.search(rf"^(\S+ \S+) INFO .*{mark}", log, re.M)
        if found is None:
            raise SystemExit(f"the log does not say {mark!r}:\n{log}")
        times.append(datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp())
    times.append(next_at)
    return Restart(tuple(b - a for a, b in itertools.pairwise(times)))


def _print(found: list[Restart]) -> None:
    print(f"{'seconds':10} {'p50':>7} {'max':>7}")
    for i, phase in enumerate(PHASES):
        values = [one.phases[i] for one in found]
        print(f"{phase:10} {median(values):7.2f} {max(values):7.2f}")
    totals = [one.total for one in found]
    print(f"{'in all':10} {median(totals):7.2f} {max(totals):7.2f}   ({len(found)} kills)")


if __name__ == "__main__":
    sys.exit(main())
