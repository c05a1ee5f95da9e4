"""`scripts/chaos.py --kill`: processes die and hang at any moment, and streams stay right.

A hundred clients stream from a tiny model and twenty adapters, half of them loaded at run time.
Meanwhile ranks, what starts them and the frontend are killed (SIGKILL) and stopped (SIGSTOP, some
go on later), also while they start. A client whose connection ends with the frontend asks again;
the frontend is started again on its port, with its state file. Wrong are: a text, finish or usage
other than undisturbed, an error, a hang, a process that outlives its server, ranks that differ, and
recordings that do not replay.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import chaos_replay
import support_path  # noqa: F401  # tests/support becomes importable
from chaos_report import Report
from chaos_world import BASE, make_files
from support.processes import FORKS, Process, family, ranks

from mstar_tp.testing.server import Server

NUM_ADAPTERS = 20
NUM_CLIENTS = 100
TOKENS = (24, 64)
"""The fewest and the most of an answer."""
CLEAR_LEAD = 2e-3
"""Between the two best log probabilities of a greedy answer's every token."""
PATIENCE_S = 300.0
"""A stream that takes longer hangs. On a machine that others starve a start alone takes minutes."""
READY_WITHIN_S = 240.0
END_WITHIN_S = 180.0
MORE_S = 90
"""The seconds past its time that a run goes on until it has killed and stopped something."""
MAX_REPLAYED = 4
"""Groups whose recordings are replayed, the last ones."""


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int

    def body(self, **more: object) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.num_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }


@dataclass(slots=True)
class Answer:
    text: str = ""
    finish: str | None = None
    usage: Any = None
    done: bool = False
    leads: list[float] = field(default_factory=list)

    @property
    def told(self) -> tuple[object, ...]:
        return self.text, self.finish, self.usage


class SaidError(Exception):
    """The server answered with an error."""


def run(seconds: float, seed: int, tp: int, mean_s: float) -> int:
    """Exit code 1 when anything was wrong. ``mean_s``: between two deaths, on average."""
    report = Report()
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-kill-")))
        make_files(folder, num_weights=NUM_ADAPTERS, seed=seed)
        chaos = _Kill(folder, random.Random(f"kill {seed}"), tp, mean_s, report)
        stack.callback(chaos.end_server)
        chaos.start_server()
        report.stats["ready after"] = f"{time.monotonic() - start:.1f} s"
        asyncio.run(chaos.run(seconds))
        chaos.stop_server()
        chaos.replay()
    report.stats["wall"] = f"{time.monotonic() - start:.1f} s"
    print(f"chaos --kill: {seconds:g} s, seed {seed}, tp {tp}, {NUM_CLIENTS} clients")
    report.print()
    return 1 if report.violations else 0


class _Kill:
    def __init__(
        self, folder: Path, rng: random.Random, tp: int, mean_s: float, report: Report
    ) -> None:
        self._folder = folder
        self._rng = rng
        self._tp = tp
        self._mean_s = mean_s
        self._report = report
        self._port = _free_port()
        self._starts = 0
        self._seen: dict[int, Process] = {}
        """Every process that ever belonged to a server."""
        self._questions: list[tuple[Question, tuple[object, ...]]] = []
        self._up = asyncio.Event()
        self._gaps: list[float] = []

    # ------------------------------------------------------------------ the server

    def start_server(self) -> None:
        (self._folder / "tmp").mkdir(exist_ok=True)
        names = [f"weights-{i}" for i in range(NUM_ADAPTERS)]
        library = self._folder / "library"
        configured = [f"{name}={library / name}" for name in names[: NUM_ADAPTERS // 2]]
        self._recording = self._folder / f"server{self._starts}.rec"
        self._starts += 1
        self._server = Server(
            *(str(self._folder / "model"), "--served-model-name", BASE, "--tp", str(self._tp)),
            *("--dtype", "float32", "--lora-root", str(library), "--max-loras", "6"),
            *("--max-cpu-loras", "10", "--max-lora-rank", "8", "--max-model-len", "128"),
            *("--max-num-seqs", "24", "--max-num-batched-tokens", "128", "--block-size", "8"),
            *("--num-kv-pages", "80", "--max-restarts", "1000", "--step-timeout", "20"),
            *("--state-file", str(self._folder / "state.json"), "--port", str(self._port)),
            *("--record", str(self._recording), "--lora", *configured),
            env={"TMPDIR": str(self._folder / "tmp")},
        )
        self._server.__enter__()
        self._note_processes()
        self._up.set()

    def _note_processes(self) -> None:
        for process in family(self._server.process.pid):
            self._seen[process.pid] = process

    def stop_server(self) -> None:
        self._note_processes()
        code = self._server.stop()
        if code != 0:
            self._report.violation("end", f"the server ended with code {code}")
        self._check_gone()
        left = list((self._folder / "tmp").iterdir())
        if left:
            self._report.violation("leak", f"left behind: {left}")
        if self._report.violations:
            kept = Path(tempfile.mkdtemp(prefix="mstar-kill-failed-")) / "server.log"
            kept.write_text(self._server.log, encoding="utf-8")
            print(f"the server's log: {kept}", file=sys.stderr)

    def end_server(self) -> None:
        """Whatever happened, leave no process."""
        for process in self._seen.values():
            process.send(signal.SIGKILL)

    def _check_gone(self) -> None:
        for process in self._seen.values():
            if not process.wait_gone(5.0):
                self._report.violation("leak", f"{process} outlived its server")

    # ------------------------------------------------------------------ a run

    async def run(self, seconds: float) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{self._port}", connector=connector, timeout=timeout
        ) as session:
            await self._load_all(session)
            await self._ask_undisturbed(session)
            stop = asyncio.Event()
            clients = [
                asyncio.ensure_future(self._client(session, stop)) for _ in range(NUM_CLIENTS)
            ]
            others = [
                asyncio.ensure_future(self._kill_all_the_time(stop)),
                asyncio.ensure_future(self._churn(session, stop)),
            ]
            await asyncio.wait([*clients, *others], timeout=seconds)
            for _ in range(MORE_S):
                if not self._missing():
                    break
                await asyncio.wait([*clients, *others], timeout=1.0)
            else:
                self._report.violation("end", f"never happened: a process {self._missing()}")
            stop.set()
            for other in others:
                await other
            _, late = await asyncio.wait(clients, timeout=END_WITHIN_S)
            for task in late:
                task.cancel()
                self._report.violation("hang", "a client did not end")
            for result in await asyncio.gather(*clients, return_exceptions=True):
                if isinstance(result, Exception):
                    self._report.violation("failure", f"a client failed: {result!r}")
            if not late:
                await self._check_end(session)

    async def _load_all(self, session: aiohttp.ClientSession) -> None:
        for i in range(NUM_ADAPTERS // 2, NUM_ADAPTERS):
            name = f"weights-{i}"
            status, text = await self._operate(session, "load", name, name)
            if status != 200:
                raise SystemExit(f"{name} cannot be loaded: {text}")

    async def _operate(
        self, session: aiohttp.ClientSession, what: str, name: str, folder: str | None = None
    ) -> tuple[int, str]:
        body = {"lora_name": name}
        if folder is not None:
            body["lora_path"] = str(self._folder / "library" / folder)
        async with session.post(f"/v1/{what}_lora_adapter", json=body) as answer:
            return answer.status, await answer.text()

    async def _ask_undisturbed(self, session: aiohttp.ClientSession) -> None:
        """Every question's undisturbed answer.

        Questions whose greedy answer is nearly a tie are left out.
        """
        models = [BASE, *(f"weights-{i}" for i in range(NUM_ADAPTERS))]
        questions = []
        for number, model in enumerate(models * 4):
            length = self._rng.choice((5, 17, 41))
            questions.append(
                Question(
                    model,
                    tuple(self._rng.randrange(3, 200) for _ in range(length)),
                    self._rng.randint(*TOKENS),
                    0.0 if number % 2 else 0.8,
                    self._rng.randrange(1 << 30),
                )
            )
        answers = [asyncio.ensure_future(self._ask(session, q, logprobs=2)) for q in questions]
        for question, answer in zip(questions, await asyncio.gather(*answers), strict=True):
            if question.temperature or min(answer.leads) > CLEAR_LEAD:
                self._questions.append((question, answer.told))
        self._report.stats["questions"] = len(self._questions)

    async def _client(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        rng = random.Random(self._rng.random())
        while not stop.is_set():
            question, wanted = rng.choice(self._questions)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await self._until_answered(session, question)
            except TimeoutError:
                self._report.violation("hang", f"{question} has no end")
                return
            except SaidError as error:
                self._report.violation("failure", f"{question}: {error}")
                continue
            self._report.ends["right" if answer.told == wanted else "wrong"] += 1
            if answer.told != wanted:
                self._report.violation("wrong text", f"{question}: {answer.told} not {wanted}")

    async def _until_answered(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        while True:
            try:
                answer = await self._ask(session, question)
                if answer.done:
                    return answer
            except (aiohttp.ClientError, ConnectionError):
                pass
            if self._up.is_set() and self._server.process.poll() is None:
                raise SaidError("the connection broke, and the server lives")
            # Its stream ended with the frontend: it asks again.
            self._report.ends["cut off with the frontend"] += 1
            await self._up.wait()

    async def _ask(
        self, session: aiohttp.ClientSession, question: Question, **more: object
    ) -> Answer:
        answer, before = Answer(), time.monotonic()
        async with session.post("/v1/completions", json=question.body(**more)) as response:
            if response.status != 200:
                raise SaidError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                now = time.monotonic()
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    answer.done = True
                    break
                _take(json.loads(line[6:]), answer)
                self._gaps.append(now - before)
                before = now
        return answer

    async def _churn(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Adapters come and go under one name, whether ranks are up or not."""
        served: bool | None = False
        while not stop.is_set():
            try:
                if served is None:
                    async with session.get("/v1/models/churn") as found:
                        served = found.status == 200
                what = "unload" if served else "load"
                folder = None if served else f"weights-{self._rng.randrange(NUM_ADAPTERS)}"
                status, text = await self._operate(session, what, "churn", folder)
                if status != 200:
                    self._report.violation("failure", f"{what} answered {status}: {text}")
                self._report.events[f"{what}s"] += 1
                served = not served
            except (aiohttp.ClientError, ConnectionError):
                served = None
                await self._up.wait()
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------ deaths

    async def _kill_all_the_time(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            # Some deaths come while the one before is being mended.
            wait_s = self._rng.expovariate(1 / self._mean_s)
            if self._rng.random() < 0.7:
                await self._until_ready()
            try:
                await asyncio.wait_for(stop.wait(), wait_s)
            except TimeoutError:
                self._note_processes()
                await self._strike()
        self._note_processes()
        for process in self._seen.values():
            process.send(signal.SIGCONT)

    def _missing(self) -> list[str]:
        """The actions that no process has suffered yet."""
        done = " ".join(self._report.events)
        return [what for what in ("killed", "stopped") if what not in done]

    async def _strike(self) -> None:
        kind = self._rng.choices(
            ("a rank killed", "a rank stopped", "a rank stopped for a while", "forks killed",
             "forks stopped", "the frontend stopped for a while", "the frontend killed"),
            (40, 8, 10, 8, 6, 8, 4),
        )[0]  # fmt: skip
        pid = self._server.process.pid
        if kind.startswith("the frontend"):
            (victim,) = [one for one in family(pid) if one.pid == pid] or [None]
        elif kind.startswith("forks"):
            victim = next((one for one in family(pid) if one.name == FORKS), None)
        else:
            found = ranks(pid)
            victim = self._rng.choice(found) if found else None
        if victim is None:
            return
        self._report.events[kind] += 1
        if kind == "the frontend killed":
            await self._kill_frontend(victim)
        elif kind.endswith("killed"):
            victim.send(signal.SIGKILL)
        else:
            victim.send(signal.SIGSTOP)
            if kind.endswith("for a while"):
                await asyncio.sleep(self._rng.uniform(0.05, 7.0))
                victim.send(signal.SIGCONT)

    async def _kill_frontend(self, frontend: Process) -> None:
        self._up.clear()
        below = family(frontend.pid)
        frontend.send(signal.SIGKILL)
        await asyncio.to_thread(self._server.process.wait)
        for process in below:
            if not await asyncio.to_thread(process.wait_gone, 5.0):
                self._report.violation("leak", f"{process} outlived its frontend by 5 s")
        await asyncio.to_thread(self.start_server_again)
        self._up.set()

    def start_server_again(self) -> None:
        self._server.stop()
        self.start_server()

    async def _until_ready(self) -> None:
        end = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < end:
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://127.0.0.1:{self._port}/health") as answer,
                ):
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, ConnectionError):
                pass
            await asyncio.sleep(0.1)
        self._report.violation("hang", f"not ready again within {READY_WITHIN_S:g} s")

    # ------------------------------------------------------------------ the end

    async def _check_end(self, session: aiohttp.ClientSession) -> None:
        await self._until_ready()
        async with session.get("/debug/state") as answer:
            state = await answer.json()
        leader, *followers = state["ranks"]
        for rank in state["ranks"]:
            held = [slot for slot in rank["slots"] if slot["holders"]]
            kept = rank["kv_host"]["pages_used"]
            if rank["requests"] or rank["pages_used"] or kept or held:
                self._report.violation("leak", f"rank {rank['rank']} holds {rank}")
        for rank in followers:
            for table in ("checks", "slots", "cpu_cache", "served"):
                if rank[table] != leader[table]:
                    self._report.violation("divergence", f"{table} of rank {rank['rank']}")
        if state["frontend"]["requests"]:
            self._report.violation("leak", f"the frontend holds {state['frontend']}")
        async with session.get("/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith("mstar_tp_restarts_total"):
                    self._report.stats["restarts of the last server"] = line.split()[1]
        offloads = leader["kv_host"]["offloads"]
        self._report.stats["rows whose KV the last group's host memory kept"] = offloads
        self._report.stats["server starts"] = self._starts
        ordered = sorted(self._gaps)
        if ordered:
            shown = [ordered[int(len(ordered) * q)] for q in (0.5, 0.99)] + [ordered[-1]]
            texts = ", ".join(f"{value:.2f}" for value in shown)
            self._report.stats["seconds between tokens, p50, p99, most"] = texts

    def replay(self) -> None:
        """The last groups that wrote something: every rank's tables are what the order makes."""
        checked = 0
        files = sorted(self._folder.glob("*.rank0"), key=lambda path: path.stat().st_mtime)
        for leader in reversed(files):
            base = leader.with_suffix("")
            followers = [Path(f"{base}.rank{rank}") for rank in range(1, self._tp)]
            if checked < MAX_REPLAYED and all(
                path.exists() and path.stat().st_size > 20_000 for path in (leader, *followers)
            ):
                chaos_replay.check(base, self._tp, self._report)
                checked += 1
        self._report.stats["groups replayed"] = checked


def _take(tree: dict[str, Any], answer: Answer) -> None:
    if "error" in tree:
        raise SaidError(tree["error"]["message"])
    if tree.get("usage"):
        # What of the prompt was kept depends on what was asked before.
        del tree["usage"]["prompt_tokens_details"]
        answer.usage = tree["usage"]
    for choice in tree["choices"]:
        answer.text += choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish
        for top in (choice.get("logprobs") or {}).get("top_logprobs") or ():
            best, second = sorted(top.values(), reverse=True)[:2]
            answer.leads.append(best - second)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
