"""Ask a server for ten times what it can do, and see that it stays itself.

    python scripts/bench_overload.py                  a tiny model, CPU, two ranks, a minute
    python scripts/bench_overload.py --seconds 10 --times 20

First it measures what the server sustains, then requests leave at that rate times ``--times``,
whatever comes back. Exits with 1 unless: requests past the bound are refused at once (503 with
Retry-After), those taken end within what the queue explains, memory stays flat, every request has
one of these two ends, and within 5 s of the load's end a lone request is as quick as before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp

from mstar_tp.testing.processes import family
from mstar_tp.testing.server import Server

ROWS = 16
MAX_QUEUE = 64
BODY = {"model": "base", "prompt": [5] * 24, "max_tokens": 16, "temperature": 0}
REFUSED_WITHIN_S = 2.0
"""99 of 100 refusals, from a client on the same two cores as the server."""
RECOVERED_WITHIN_S = 5.0
SLACK = 4.0
"""Times what the queue explains: two cores serve both the load and its clients."""
GROWTH = 1.15
"""Of a process's memory between a third of the load and its end."""
GROWTH_MB = 24


@dataclass(slots=True)
class Outcomes:
    taken_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


async def measure(url: str, pid: int, seconds: float, times: float) -> tuple[list[str], list[str]]:
    """What was found, and what was wrong, a line each. ``pid``: the server's process."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        alone_s = median([await _lone(session) for _ in range(5)])
        rate = await _sustainable(session, max(2.0, seconds / 10))
        outcomes, memory = Outcomes(), _Memory(pid)
        await _load(session, rate * times, seconds, outcomes, memory)
        recovered_s = await _recovery(session, alone_s)
    found = [
        f"sustains {rate:.1f} requests/s; asked for {rate * times:.0f}/s for {seconds:g} s",
        f"taken: {_spread(outcomes.taken_s)}",
        f"refused: {_spread(outcomes.refused_s)}",
        f"memory, MB: {memory.says()}",
        f"recovered after {recovered_s:.1f} s",
    ]
    bound_s = SLACK * (MAX_QUEUE / rate + alone_s)
    wrong = [*outcomes.other[:5], *memory.grown()]
    if not outcomes.refused_s:
        wrong.append("nothing was refused: the load was none")
    elif _quantile(outcomes.refused_s, 0.99) > REFUSED_WITHIN_S:
        wrong.append(f"refusals took {_spread(outcomes.refused_s)}")
    if not outcomes.taken_s or max(outcomes.taken_s) > bound_s:
        wrong.append(f"{_spread(outcomes.taken_s)}, and the queue explains {bound_s:.1f} s")
    if recovered_s > RECOVERED_WITHIN_S:
        wrong.append(f"it recovered after {recovered_s:.1f} s only")
    return found, wrong


async def _lone(session: aiohttp.ClientSession) -> float:
    start = time.perf_counter()
    async with session.post("/v1/completions", json=BODY) as answer:
        await answer.read()
        answer.raise_for_status()
    return time.perf_counter() - start


async def _sustainable(session: aiohttp.ClientSession, seconds: float) -> float:
    """Requests a second of as many clients as there are rows."""
    ended, end = 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal ended
        while time.perf_counter() < end:
            await _lone(session)
            ended += 1

    await asyncio.gather(*(client() for _ in range(ROWS)))
    return ended / seconds


async def _load(
    session: aiohttp.ClientSession,
    rate: float,
    seconds: float,
    outcomes: Outcomes,
    memory: _Memory,
) -> None:
    start, sent = time.perf_counter(), 0
    asked: set[asyncio.Task[None]] = set()
    while (now := time.perf_counter() - start) < seconds:
        while sent < now * rate:
            task = asyncio.ensure_future(_ask(session, outcomes))
            asked.add(task)
            task.add_done_callback(asked.discard)
            sent += 1
        if now > seconds / 3:
            memory.look()
        await asyncio.sleep(0.01)
    await asyncio.gather(*asked)
    memory.look(last=True)


async def _ask(session: aiohttp.ClientSession, outcomes: Outcomes) -> None:
    start = time.perf_counter()
    try:
        async with session.post("/v1/completions", json=BODY) as answer:
            text = await answer.text()
    except aiohttp.ClientError as error:
        outcomes.other.append(f"a request broke: {error!r}")
        return
    took_s = time.perf_counter() - start
    if answer.status == 200:
        outcomes.taken_s.append(took_s)
    elif answer.status == 503 and "queue_full" in text and int(answer.headers["retry-after"]) > 0:
        outcomes.refused_s.append(took_s)
    else:
        outcomes.other.append(f"a request was answered {answer.status}: {text}")


async def _recovery(session: aiohttp.ClientSession, alone_s: float) -> float:
    """Seconds until a lone request is as quick as before the load, give or take."""
    start = time.perf_counter()
    while (since_s := time.perf_counter() - start) < 4 * RECOVERED_WITHIN_S:
        if await _lone(session) < 3 * alone_s + 0.1:
            break
    return since_s


class _Memory:
    """Resident MB of every process of the server: early in the load, and at its end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def look(self, last: bool = False) -> None:
        if self._first and not last:
            return
        sizes = {}
        for process in family(self._pid):
            with contextlib.suppress(OSError):
                sizes[process.name] = process.resident_mb
        self._first, self._last = self._first or sizes, sizes

    def says(self) -> str:
        names = sorted(self._first)
        return ", ".join(f"{n} {self._first[n]} to {self._last.get(n, 0)}" for n in names)

    def grown(self) -> list[str]:
        return [
            f"{name} grew from {first} to {self._last.get(name, 0)} MB"
            for name, first in self._first.items()
            if self._last.get(name, 0) > first * GROWTH + GROWTH_MB
        ]


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(len(values) * q)]


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = (_quantile(values, q) for q in (0.5, 0.99))
    return f"{len(values)}, p50 {p50:.3f}, p99 {p99:.3f}, most {max(values):.3f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as folder:
        from chaos_world import make_files

        model = make_files(Path(folder), num_weights=3, seed=0)
        server = Server(
            *(str(model), "--served-model-name", "base", "--tp", str(args.tp), "--dtype"),
            *("float32", "--max-model-len", "128", "--max-num-seqs", str(ROWS)),
            *("--max-queue", str(MAX_QUEUE)),
        )
        with server:
            pid = server.process.pid
            found, wrong = asyncio.run(measure(server.url, pid, args.seconds, args.times))
    print("\n".join(found))
    print("\n".join(f"WRONG: {one}" for one in wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
