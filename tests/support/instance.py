"""Real rank processes behind a frontend link that a test or a script drives by hand.

There is no HTTP and no tokenizer.

The ranks are the ones that serve: what ``python -m mstar_tp.worker`` runs, with torchrun's
environment, each with a hash seed of its own (see ``rank_forks``, which starts them). Whoever
drives it is the conductor: it numbers requests and reads tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq
from torch._C._distributed_c10d import TCPStore

from mstar_tp.common.errors import MstarError, PeerLostError
from mstar_tp.common.version import VERSION
from mstar_tp.config import ServeConfig
from mstar_tp.wire.channels import Bind, FrontendLink, Lost
from mstar_tp.wire.commands import ConductorMessage, Inspect, NewRequest, Shutdown
from mstar_tp.wire.handshake import Hello
from mstar_tp.wire.reports import (
    Fatal,
    RankReport,
    Ready,
    RequestFailed,
    StartFailed,
    Token,
    Tokens,
)
from mstar_tp.wire.states import StateReport
from mstar_tp.wire.values import AdapterKey, SamplingParams
from support.rank_forks import ForkedRank, Source, source

T = TypeVar("T")


@dataclass(slots=True)
class Generation:
    """One request's answer so far."""

    rid: int
    tokens: list[Token] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The steps that its tokens were sampled in."""
    failed: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]


class RankProcesses:
    """``world_size`` worker processes of one group, their output in one log file each."""

    def __init__(
        self,
        config: ServeConfig,
        frontend: str,
        instance_id: str,
        folder: Path,
        *,
        views: Sequence[Path] | None = None,
        env: Mapping[str, str] | None = None,
        before: Path | None = None,
    ) -> None:
        """Build the instance.

        ``views``: each rank's working folder, from where a relative path leads to files of its own;
        ``env`` is added to the environment; ``before`` is a script that each rank runs before it
        serves.
        """
        self._before = before
        self._views = views
        self._env = env or {}
        world_size = config.engine.tensor_parallel_size
        # The store listens on a port that the kernel chose and stays open: nobody else can take it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = folder / "config.yaml"
        path.write_text(config.dump_yaml(), encoding="utf-8")
        self.logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        args = [str(path), "--frontend", frontend, "--instance-id", instance_id]
        sources = [source(rank) for rank in range(world_size)]  # which import side by side
        self.processes = [
            self._start(sources[rank], args, rank, log) for rank, log in enumerate(self.logs)
        ]

    def _start(self, source: Source, args: list[str], rank: int, log: Path) -> ForkedRank:
        world_size = len(self.logs)
        env = {
            **os.environ,
            **self._env,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        cwd = Path.cwd() if self._views is None else self._views[rank]
        return source.start(args, env, cwd, log, self._before)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes, once all have ended. Raises TimeoutExpired."""
        return [process.wait(timeout_s) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def tail(self, lines: int = 30) -> str:
        """The end of every rank's log, for an error message."""
        parts = []
        for log in self.logs:
            text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            parts.append(f"--- {log.name}\n" + "\n".join(text))
        return "\n".join(parts)


class Instance:
    """Starts the ranks of ``config`` on entry and stops them on exit.

    ``views``: a working folder a rank, so that each finds files of its own under one relative path.
    ``faults``: a file of the faults that the ranks make (``testing.faults``). ``before``: a script
    that each rank runs before it serves. ``env`` is added to the ranks' environment.

    Raises:
        MstarError: on entry, when a rank cannot start (its cause and the ranks' logs).
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        timeout_s: float = 240.0,
        views: Sequence[Path] | None = None,
        faults: Path | None = None,
        before: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self._views = views
        self._before = before
        self._env: dict[str, str] = {**(env or {})}
        if faults is not None:
            self._env |= {"MSTAR_TP_TEST_MODE": "1", "MSTAR_TP_FAULTS": str(faults.resolve())}
        self._held: dict[bytes, list[bytes]] = {}
        """Frames for peers that get none for now."""
        self.ready: dict[int, Ready] = {}
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="instance", daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="mstar-")
        self._generations: dict[int, Generation] = {}
        self._states: dict[int, dict[int, StateReport]] = {}
        self._other: list[tuple[int, RankReport]] = []
        self._changed: asyncio.Condition
        self._dead: str | None = None
        self._watchers: list[Thread] = []
        self._next = 0

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._dead is None:
                self.send(Shutdown())
                codes = self.ranks.wait(self._timeout_s)
                assert kind is not None or codes == [0] * len(codes), (
                    f"ranks ended with {codes}\n{self.ranks.tail()}"
                )
        finally:
            self._end()

    # ------------------------------------------------------------------ driving

    def send(self, message: ConductorMessage) -> None:
        """One message into the conductor stream."""
        self._call(self._send(message))

    def hold(self, rank: int) -> None:
        """Conductor messages reach ``rank`` after ``release`` only; the other ranks at once."""
        self._call(self._hold(rank))

    def release(self, rank: int) -> None:
        """Deliver the frames held for ``rank``, in order."""
        self._call(self._release(rank))

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, adapter: AdapterKey | None = None
    ) -> int:
        """Open a request; its number."""
        rid = self._next
        self._next += 1
        self._generations[rid] = Generation(rid)
        self.send(NewRequest(rid=rid, prompt=tuple(prompt), params=params, adapter=adapter))
        return rid

    def result(self, rid: int) -> Generation:
        """Wait for a request's end."""
        return self._call(self._result(rid))

    def generate(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams, AdapterKey | None]]
    ) -> list[Generation]:
        """All at once: the leader has none before all were sent. Their answers in order."""
        self.hold(0)
        rids = [self.submit(*request) for request in requests]
        self.release(0)
        return [self.result(rid) for rid in rids]

    def inspect(self, rank: int | None = None) -> list[StateReport]:
        """Every rank's tables, in rank order, at one place in the schedule.

        With ``rank``: its tables alone, which waits for no other rank.
        """
        world_size = self.config.engine.tensor_parallel_size
        return self._call(self._inspect(range(world_size) if rank is None else [rank]))

    def wait_report(self, kind: type[T], count: int = 1) -> list[tuple[int, T]]:
        """The next ``count`` reports of a kind that no call above uses, with their ranks."""
        return self._call(self._wait_report(kind, count))

    # ------------------------------------------------------------------ on the loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(self._timeout_s)

    async def _start(self) -> None:
        self._changed = asyncio.Condition()
        world_size = self.config.engine.tensor_parallel_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(
            role="rank",
            rank=-1,
            world_size=world_size,
            instance_id="test",
            config_digest=self.config.digest(),
            version=VERSION,
        )
        self._link = FrontendLink(self._context, Bind("ipc"), hello)
        self._link.start()
        self.ranks = RankProcesses(
            self.config,
            self._link.address,
            "test",
            Path(self._folder.name),
            views=self._views,
            env=self._env,
            before=self._before,
        )
        self._reader = asyncio.ensure_future(self._read())
        for rank, process in enumerate(self.ranks.processes):
            self._watchers.append(Thread(target=self._watch, args=(rank, process), daemon=True))
            self._watchers[-1].start()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._dead is not None or len(self.ready) == world_size
            )
        if self._dead is not None:
            raise MstarError(f"{self._dead}\n{self.ranks.tail()}")

    async def _read(self) -> None:
        while True:
            rank, report = await self._link.receive()
            async with self._changed:
                self._take(rank, report)
                self._changed.notify_all()

    def _take(self, rank: int, report: RankReport | Lost) -> None:
        match report:
            case Ready():
                self.ready[rank] = report
            case StartFailed(cause=cause) | Fatal(cause=cause):
                self._dead = self._dead or f"rank {rank}: {cause}"
            case Lost(cause=cause):
                self._dead = self._dead or cause
            case Tokens():
                for token in report.tokens:
                    generation = self._generations[token.rid]
                    generation.tokens.append(token)
                    generation.steps.append(report.tp_seq)
                    if token.finish is not None:
                        generation.done.set()
            case RequestFailed(rid=rid, cause=cause):
                self._generations[rid].failed = cause
                self._generations[rid].done.set()
            case StateReport(query_id=query_id):
                self._states[query_id][rank] = report
            case _:
                self._other.append((rank, report))

    def _watch(self, rank: int, process: ForkedRank) -> None:
        code = process.wait()
        asyncio.run_coroutine_threadsafe(self._ended(rank, code), self._loop)

    async def _ended(self, rank: int, code: int) -> None:
        async with self._changed:
            self._dead = self._dead or f"rank {rank} ended with code {code}"
            self._changed.notify_all()

    async def _send(self, message: ConductorMessage) -> None:
        self._link.send_all(message)

    async def _hold(self, rank: int) -> None:
        server = self._link._server
        send = server._send

        def unless_held(peer: bytes, data: bytes) -> bool:
            if peer not in self._held:
                return send(peer, data)
            self._held[peer].append(data)
            return True

        if not self._held:
            server._send = unless_held  # type: ignore[method-assign]
        self._held[server._welcomed[rank]] = []

    async def _release(self, rank: int) -> None:
        server = self._link._server
        peer = server._welcomed[rank]
        for data in self._held.pop(peer):
            server._send(peer, data)
        if not self._held:
            del server._send

    async def _until(self, reached: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._dead is not None or reached())
        if self._dead is not None and not reached():
            raise PeerLostError(f"{self._dead}\n{self.ranks.tail()}")

    async def _result(self, rid: int) -> Generation:
        generation = self._generations[rid]
        await self._until(generation.done.is_set)
        return generation

    async def _inspect(self, ranks: Sequence[int]) -> list[StateReport]:
        query_id = self._next
        self._next += 1
        states = self._states[query_id] = {}
        self._link.send_all(Inspect(query_id=query_id))
        await self._until(lambda: all(rank in states for rank in ranks))
        return [states[rank] for rank in ranks]

    async def _wait_report(self, kind: type[T], count: int) -> list[tuple[int, T]]:
        def found() -> list[tuple[int, T]]:
            return [(rank, r) for rank, r in self._other if isinstance(r, kind)]

        await self._until(lambda: len(found()) >= count)
        taken = found()[:count]
        for item in taken:
            self._other.remove(item)  # type: ignore[arg-type]
        return taken

    async def _stop_link(self) -> None:
        if hasattr(self, "_reader"):
            self._reader.cancel()
        if hasattr(self, "_link"):
            self._link.close()

    def _end(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.kill()
        for watcher in self._watchers:
            watcher.join()
        self._call(self._stop_link())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()
