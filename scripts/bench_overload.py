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
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import support_path  # noqa: F401  # tests/support becomes importable
from lean_client import Answer, LeanClient
from support.processes import family

from mstar_tp.testing.server import Server

ROWS = 16
MAX_QUEUE = 64
BODY = {"model": "base", "prompt": [5] * 24, "max_tokens": 16, "temperature": 0}
REFUSED_WITHIN_S = 0.25
"""99 of 100 refusals, from a client on the same two cores as the server."""
RECOVERED_WITHIN_S = 5.0
SLACK = 2.0
"""Times what the queue explains: two cores serve both the load and its clients."""
GROWTH = 1.02
"""The most that a process's memory may grow between a third of the load and its end."""
GROWTH_MB = 8


@dataclass(slots=True)
class Outcomes:
    taken_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def note(self, done: asyncio.Future[Answer], due: float) -> None:
        """Note the end of the request that was due at ``due``."""
        error = done.exception()
        if error is not None:
            self.other.append(f"a request broke: {error!r}")
            return
        answer, took_s = done.result(), time.perf_counter() - due
        if answer.status == 200:
            self.taken_s.append(took_s)
        elif answer.status == 503 and b"queue_full" in answer.body and answer.retry_after > 0:
            self.refused_s.append(took_s)
        else:
            self.other.append(f"a request was answered {answer.status}: {answer.body!r}")


async def measure(url: str, pid: int, seconds: float, times: float) -> tuple[list[str], list[str]]:
    """Measure; the result, and the faults, a line each. ``pid``: the server's process."""
    client = LeanClient(url, "/v1/completions", json.dumps(BODY).encode())
    alone_s = median([await _lone(client) for _ in range(5)])
    rate, full_s = await _sustainable(client, max(2.0, seconds / 10))
    outcomes, memory, cores = Outcomes(), _Memory(pid), _Cores(pid)
    await _load(client, rate * times, seconds, outcomes, memory)
    shares = cores.says()
    recovered_s = await _recovery(client, alone_s)
    client.close()
    found = [
        f"alone {alone_s:.3f} s; sustains {rate:.1f} requests/s, each {full_s:.3f} s",
        f"asked for {rate * times:.0f}/s for {seconds:g} s",
        f"taken: {len(outcomes.taken_s) / seconds:.1f} a second: {_spread(outcomes.taken_s)}",
        f"refused: {_spread(outcomes.refused_s)}",
        f"cores used: {shares}",
        f"memory, MB: {memory.says()}",
        f"recovered after {recovered_s:.1f} s",
    ]
    bound_s = SLACK * (MAX_QUEUE / rate + full_s)
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


async def _lone(client: LeanClient) -> float:
    start = time.perf_counter()
    answer = await client.ask()
    assert answer.status == 200, answer
    return time.perf_counter() - start


async def _sustainable(client: LeanClient, seconds: float) -> tuple[float, float]:
    """Requests a second of as many clients as there are rows, and what one takes (median)."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def ask() -> None:
        while time.perf_counter() < end:
            took.append(await _lone(client))

    await asyncio.gather(*(ask() for _ in range(ROWS)))
    return len(took) / seconds, median(took)


async def _load(
    client: LeanClient,
    rate: float,
    seconds: float,
    outcomes: Outcomes,
    memory: _Memory,
) -> None:
    start, sent = time.perf_counter(), 0
    asked: set[asyncio.Future[Answer]] = set()
    while (now := time.perf_counter() - start) < seconds:
        while sent < now * rate:
            # A request counts from when it was due, however late the generator is.
            due = start + sent / rate
            future = client.ask()
            asked.add(future)
            future.add_done_callback(asked.discard)
            future.add_done_callback(lambda done, due=due: outcomes.note(done, due))  # type: ignore[misc]
            sent += 1
        if now > seconds / 3:
            memory.look()
        await asyncio.sleep(0.005)
    await asyncio.wait(asked)
    memory.look(last=True)


async def _recovery(client: LeanClient, alone_s: float) -> float:
    """Seconds until a lone request is as quick as before the load, give or take."""
    start = time.perf_counter()
    while (since_s := time.perf_counter() - start) < 4 * RECOVERED_WITHIN_S:
        if await _lone(client) < 3 * alone_s + 0.1:
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
                sizes[process.name] = round(process.resident_mib)
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


class _Cores:
    """The cores that each process uses, and the generator, since this was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = time.monotonic()
        self._before = self._spent()

    def says(self) -> str:
        wall = time.monotonic() - self._start
        after = self._spent()
        shares = {name: (after[name] - self._before.get(name, 0.0)) / wall for name in after}
        return ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items()))

    def _spent(self) -> dict[str, float]:
        spent = {"the generator": time.process_time()}
        for process in family(self._pid):
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks = int(stat[11]) + int(stat[12])
                spent[process.name] = ticks / os.sysconf("SC_CLK_TCK")
        return spent


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
