"""The waits for an adapter slot: many adapters on few slots, popular ones first.

Drives the real scheduler, admission queue, CPU cache and pool, with steps that compute nothing, and
checks the bound of docs/architecture.md on every request: in the queue, at most L * (n // S + 1)
steps, where L is the longest stay of a row, n the requests that arrived before it and had not
joined when it entered, and S the slots. Exits with 1 if one waits longer.

Then sets its waits (from arrival to joining) beside those of other orders of the same requests on
the same slots and rows, found by an oracle that knows every arrival and every length: the best of
some rules, improved by moving single requests, with the lowest p95 among orders in which nobody
waits longer than the longest wait here.

At last one hot adapter always has requests waiting and cold ones ask now and then: by arrival, and
by turns. Exits with 1 if by turns the cold ones' p95 is above twice the longest stay of a row.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import support_path  # noqa: F401  # tests/support becomes importable
from support.admission_simulation import AdmissionSim

from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey


class Job(NamedTuple):
    """One request: it arrives before step ``arrival`` and runs ``output`` steps."""

    arrival: int
    adapter: int
    output: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Steps that requests waited, sorted."""

    values: list[int]

    @classmethod
    def of(cls, values: Sequence[int]) -> Waits:
        return cls(sorted(values))

    def share(self, part: float) -> int:
        """The smallest wait that ``part`` of the requests do not exceed."""
        return self.values[max(0, -(-int(part * 1000) * len(self.values) // 1000) - 1)]

    def __str__(self) -> str:
        mean = sum(self.values) / len(self.values)
        parts = (f"p{int(p * 100)} {self.share(p):>4}" for p in (0.5, 0.95, 0.99))
        return f"mean {mean:6.1f}   {'   '.join(parts)}   max {self.values[-1]:>4}"


def draw_jobs(args: argparse.Namespace) -> list[Job]:
    """Poisson arrivals; adapters by Zipf's law; lengths uniform."""
    rng = random.Random(args.seed)
    weights = list(accumulate(1 / (place + 1) ** args.zipf for place in range(args.adapters)))
    jobs, now = [], 0.0
    for _ in range(args.requests):
        now += rng.expovariate(1 / args.gap)
        (adapter,) = rng.choices(range(args.adapters), cum_weights=weights)
        jobs.append(Job(int(now), adapter, rng.randint(args.min_output, args.max_output)))
    return jobs


def simulate(jobs: Sequence[Job], args: argparse.Namespace, host: int, read_steps: int) -> Waits:
    """Run the product; the waits from arrival. Exits with 1 where the bound is broken."""
    spec = tiny_spec(slots=args.slots, cpu_capacity=host, layers=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_adapter(folder, q_pairs(spec)))
        sim = AdmissionSim(spec, max_num_seqs=args.rows, read_steps=read_steps)
        keys = [AdapterKey(f"lora-{i:02}", 1) for i in range(args.adapters)]
        try:
            sim.serve([(key, path) for key in keys])
            next_job = 0
            while next_job < len(jobs) or len(sim.requests):
                while next_job < len(jobs) and jobs[next_job].arrival <= sim.now:
                    job = jobs[next_job]
                    sim.arrive(next_job, keys[job.adapter], output=job.output)
                    next_job += 1
                sim.step()
        finally:
            sim.close()
    visits = list(sim.visits.values())
    longest = max((v.left or 0) - (v.joined or 0) for v in visits)
    places = min(args.slots, args.rows)
    bounds = [longest * (v.ahead // places + 1) for v in visits]
    queue = Waits.of([v.wait for v in visits])
    broken = sum(v.wait > bound for v, bound in zip(visits, bounds, strict=True))
    used = max(v.wait / bound for v, bound in zip(visits, bounds, strict=True))
    print(
        f"CPU cache of {host}, reads of {read_steps} steps, longest stay {longest}, "
        f"{sim.now} steps:\n"
        f"  wait in the queue     {queue}\n"
        f"  past the bound        {broken} of {len(visits)}; closest to it {used:.0%}"
    )
    if broken:
        sys.exit(1)
    return Waits.of([(v.joined or 0) - v.arrived for v in visits])


class Oracle:
    """Schedules that know everything: requests join by a given ranking, lowest first."""

    def __init__(self, jobs: Sequence[Job], slots: int, rows: int) -> None:
        self._jobs = jobs
        self._slots = slots
        self._rows = rows

    def waits(self, rank: Sequence[float], *, may_pass: bool) -> list[int]:
        """The waits when those that arrived join by ``rank``.

        A request that finds no slot holds back the others that want one, or lets those pass whose
        adapter has one.
        """
        jobs, waits = self._jobs, [0] * len(self._jobs)
        waiting: list[tuple[float, int]] = []
        ends: dict[int, list[int]] = {}
        running: Counter[int] = Counter()
        count = arrived = now = 0
        while arrived < len(jobs) or waiting:
            for job in ends.pop(now, ()):
                running[jobs[job].adapter] -= 1
                if not running[jobs[job].adapter]:
                    del running[jobs[job].adapter]
                count -= 1
            while arrived < len(jobs) and jobs[arrived].arrival <= now:
                insort(waiting, (rank[arrived], arrived))
                arrived += 1
            left = []
            for place, (key, job) in enumerate(waiting):
                adapter = jobs[job].adapter
                if count == self._rows:
                    left += waiting[place:]
                    break
                if adapter not in running and len(running) == self._slots:
                    left.append((key, job))
                    if not may_pass:
                        left += waiting[place + 1 :]
                        break
                    continue
                running[adapter] += 1
                count += 1
                waits[job] = now - jobs[job].arrival
                ends.setdefault(now + jobs[job].output, []).append(job)
            waiting = left
            now += 1
        return waits

    def best(self, longest: int, tries: int, seed: int) -> tuple[str, Waits]:
        """The order with the lowest p95 in which nobody waits more than ``longest`` steps."""
        total = Counter(job.adapter for job in self._jobs)
        rules: dict[str, Callable[[int, Job], float]] = {
            "arrival": lambda i, job: i,
            "shortest first": lambda i, job: job.output + i * 1e-6,
            "arrival plus length": lambda i, job: job.arrival + job.output,
            "popular first, ageing": lambda i, job: job.arrival - 2.0 * total[job.adapter] ** 0.5,
            "grouped by adapter": lambda i, job: job.arrival // 64 * 64 + job.adapter / 100,
        }
        found: list[tuple[tuple[int, float], str, bool, list[float]]] = []
        for name, rule in rules.items():
            rank = [rule(i, job) for i, job in enumerate(self._jobs)]
            for may_pass in (False, True):
                how = f"{name}, {'passing' if may_pass else 'no passing'}"
                found.append((self._cost(rank, may_pass, longest), how, may_pass, rank))
        found.sort(key=lambda entry: entry[0])
        improved = [self._improve(entry, longest, tries, seed) for entry in found[:2]]
        _, how, may_pass, rank = min(improved, key=lambda entry: entry[0])
        return how, Waits.of(self.waits(rank, may_pass=may_pass))

    def _improve(
        self,
        start: tuple[tuple[int, float], str, bool, list[float]],
        longest: int,
        tries: int,
        seed: int,
    ) -> tuple[tuple[int, float], str, bool, list[float]]:
        cost, how, may_pass, rank = start
        rng = random.Random(seed)
        ordered = sorted(rank)
        step = (ordered[-1] - ordered[0]) / len(ordered)
        for _ in range(tries):
            waits = self.waits(rank, may_pass=may_pass)
            late = sorted(range(len(waits)), key=waits.__getitem__)[-len(waits) // 8 :]
            moved = list(rank)
            for job in rng.sample(late, k=min(len(late), rng.choice((1, 2, 4)))):
                moved[job] -= step * rng.choice((2, 8, 32))
            new = self._cost(moved, may_pass, longest)
            if new <= cost:
                cost, rank = new, moved
        return cost, f"{how}, improved", may_pass, rank

    def _cost(self, rank: Sequence[float], may_pass: bool, longest: int) -> tuple[int, float]:
        """p95, then the mean; orders in which somebody waits too long come last."""
        waits = self.waits(rank, may_pass=may_pass)
        late = max(0, max(waits) - longest)
        return Waits.of(waits).share(0.95) + 1000 * late, sum(waits)


def share(args: argparse.Namespace, *, fair: bool) -> tuple[Waits, int]:
    """Cold adapters' waits from arrival beside a hot one, and the longest stay of a row."""
    rng = random.Random(args.seed)
    spec = tiny_spec(slots=args.slots, cpu_capacity=args.cold + 1, layers=1)
    hot, *cold = [AdapterKey(f"lora-{i:02}", 1) for i in range(args.cold + 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_adapter(folder, q_pairs(spec)))
        sim = AdmissionSim(spec, max_num_seqs=args.rows, read_steps=0, fair=fair)

        def arrive(key: AdapterKey) -> None:
            sim.arrive(len(sim.visits), key, output=rng.randint(args.min_output, args.max_output))

        try:
            sim.serve([(key, path) for key in (hot, *cold)])
            sim.step()
            for _ in range(args.steps):
                busy = sum(request.adapter == hot for request in sim.requests)
                for _ in range(args.backlog + args.rows - busy):
                    arrive(hot)
                if rng.random() < 1 / (2 * args.gap):
                    arrive(rng.choice(cold))
                sim.step()
            while len(sim.requests):
                sim.step()
        finally:
            sim.close()
    visits = sim.visits.values()
    waits = Waits.of([(v.joined or 0) - v.arrived for v in visits if v.key != hot])
    return waits, max((v.left or 0) - (v.joined or 0) for v in visits)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="rows in one step")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the popularity")
    parser.add_argument("--gap", type=float, default=4.0, help="mean steps between two arrivals")
    parser.add_argument("--min-output", type=int, default=4)
    parser.add_argument("--max-output", type=int, default=32)
    parser.add_argument("--read-steps", type=int, default=5, help="steps that a read takes")
    parser.add_argument("--tries", type=int, default=300, help="moves that the oracle tries")
    parser.add_argument("--cold", type=int, default=20, help="cold adapters beside a hot one")
    parser.add_argument("--backlog", type=int, default=150, help="requests of the hot one waiting")
    parser.add_argument("--steps", type=int, default=1000, help="that hot and cold ones share")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    jobs = draw_jobs(args)
    print(
        f"{args.requests} requests on {args.adapters} adapters (Zipf {args.zipf}), {args.slots} "
        f"slots, {args.rows} rows, an arrival every {args.gap} steps, seed {args.seed}"
    )
    small = simulate(jobs, args, 2 * args.slots, args.read_steps)
    print(f"  wait from arrival     {small}")
    ours = simulate(jobs, args, args.adapters, 0)
    print(f"  wait from arrival     {ours}")
    how, best = Oracle(jobs, args.slots, args.rows).best(ours.values[-1], args.tries, args.seed)
    print(f"best order found by an oracle ({how}):\n  wait from arrival     {best}")
    ratio = ours.share(0.95) / max(1, best.share(0.95))
    print(f"p95 against the oracle's: {ratio:.2f}")
    print(f"one hot adapter with {args.backlog} requests waiting, {args.cold} cold ones:")
    by_arrival, longest = share(args, fair=False)
    by_turns, longest = share(args, fair=True)
    print(f"  cold ones by arrival  {by_arrival}\n  cold ones by turns    {by_turns}")
    return int(by_turns.share(0.95) > 2 * longest)


if __name__ == "__main__":
    sys.exit(main())
