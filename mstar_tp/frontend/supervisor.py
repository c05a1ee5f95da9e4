"""The life of one frontend process: listen, start (or await) the ranks, serve, stop in order.

``mstar-tp serve`` starts the ranks as a child; ``mstar-tp frontend`` waits for ranks that somebody
else starts. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from mstar_tp.config import ServeConfig
from mstar_tp.errors import MstarError
from mstar_tp.frontend.app import build_app
from mstar_tp.frontend.conductor import Conductor, Phase
from mstar_tp.frontend.context import Frontend
from mstar_tp.frontend.images import ImageReader
from mstar_tp.frontend.launcher import RankLauncher
from mstar_tp.frontend.screen import Screen
from mstar_tp.frontend.served import AdapterRoots, ServedModels
from mstar_tp.frontend.server import ApiServer, open_listener, url_of
from mstar_tp.frontend.tokenizer import load_tokenizer
from mstar_tp.models.config_vision import load_vision_config
from mstar_tp.version import VERSION
from mstar_tp.wire.channels import Bind, FrontendLink
from mstar_tp.wire.curve import Curve
from mstar_tp.wire.messages import Hello

logger = logging.getLogger(__name__)

CAUSES_WITHIN_S = 2.0
"""After the first rank is lost, the others get this long to say why they stop."""
MORE_CAUSES_WITHIN_S = 0.5
"""After a rank said why, the others get this long to say the same or more."""
RANKS_STOP_S = 20.0
"""Ranks that were told to stop are ended by force after this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """How a frontend process runs, beside the configuration that ranks share."""

    config: ServeConfig
    bind: str = "ipc"
    instance_id: str | None = None
    """None: a fresh one, which only ranks started by this process know."""
    curve: Curve | None = None
    start_ranks: bool = True
    screen: Screen


class Supervisor:
    """Owns the link, the API server and, where it started them, the ranks."""

    def __init__(self, options: FrontendOptions) -> None:
        self._options = options
        self._config = options.config
        self._instance_id = options.instance_id or secrets.token_hex(8)
        self._stop = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        world_size = self._config.engine.tensor_parallel_size
        bind = Bind(options.bind, options.curve, option="--listen")
        self._link = FrontendLink(self._context, bind, self._hello())
        lora = self._config.engine.lora
        served = ServedModels(
            self._config.base_names,
            self._config.engine.model,
            {} if lora is None else lora.adapters,
        )
        self._conductor = Conductor(
            self._link,
            served,
            world_size=world_size,
            max_queue=self._config.server.max_queue,
            on_progress=options.screen.progress,
        )
        self._served = served
        self._watcher: asyncio.Task[None] | None = None
        self._launcher = RankLauncher(self._on_rank_line) if options.start_ranks else None

    async def run(self) -> int:
        """Serve until a signal or the ranks' end; the exit code: 0 after an orderly stop.

        Raises:
            MstarError: the server cannot start: one screen that says why.
        """
        try:
            listener = open_listener(self._config.server.host, self._config.server.port)
            with contextlib.closing(listener), self._signals(), _run_dir() as run_dir:
                server = ApiServer(build_app(self._frontend()), listener)
                self._link.start()
                try:
                    return await self._serve(server, url_of(listener), run_dir)
                finally:
                    self._link.close()
        finally:
            self._context.term()

    # ------------------------------------------------------------------ phases

    async def _serve(self, server: ApiServer, url: str, run_dir: Path) -> int:
        router = asyncio.ensure_future(self._conductor.run())
        server.start()
        try:
            await self._start_ranks(run_dir)
            while await self._await_ready():
                self._options.screen.say(f"Serving {self._names()} on {url}")
                await _any_set(self._stop, self._conductor.changed)
                if not self._conductor.changed.is_set():
                    await self._drain()
                    return 0 if self._conductor.fault is None else 1
                await self._give_up()
                if not self._outlives_ranks():
                    return 1
                self._expect_next_group()
            return 0
        finally:
            await self._stop_ranks()
            await server.stop()
            router.cancel()
            if self._watcher is not None:
                self._watcher.cancel()

    async def _await_ready(self) -> bool:
        """True once every rank serves, False after a signal.

        Raises:
            MstarError: the ranks that this process started cannot serve; why, rank by rank. Or
                this process cannot.
        """
        limit_s = None if self._launcher is None else self._config.engine.start_timeout_s
        while True:
            ready, failed = self._conductor.became_ready, self._conductor.changed
            try:
                async with asyncio.timeout(limit_s):
                    await _any_set(self._stop, ready, failed)
            except TimeoutError:
                raise MstarError(
                    f"the ranks were not ready within {limit_s:g} s: raise --start-timeout"
                ) from None
            if self._stop.is_set():
                return False
            if not failed.is_set():
                self._note_ranks()
                return True
            await self._give_up()
            if not self._outlives_ranks():
                raise MstarError(self._why())
            self._expect_next_group()

    async def _drain(self) -> None:
        """Let running requests end within the grace time; end the others with an error."""
        conductor, grace_s = self._conductor, self._config.server.shutdown_grace_s
        conductor.drain()
        if conductor.num_live:
            self._options.screen.say(
                f"Stopping: {conductor.num_live} running requests get {grace_s:g} s to finish"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await _any_set(conductor.idle, conductor.changed)
        if conductor.changed.is_set():
            await self._give_up()
        conductor.fail_all("the server is shutting down before this request could finish")

    async def _give_up(self) -> None:
        """The ranks are gone: hear out why, and end every request with that."""
        if self._conductor.fault is None:
            await self._collect_causes()
        self._conductor.die()
        if self._launcher is None or self._conductor.ready:
            logger.error("%s", self._conductor.reason())

    def _outlives_ranks(self) -> bool:
        """Whether to wait for ranks that somebody else starts next."""
        return self._launcher is None and self._conductor.fault is None

    async def _collect_causes(self) -> None:
        """The first to be lost is seldom the cause: the others get a moment to say more."""
        conductor, clock = self._conductor, asyncio.get_running_loop().time
        world_size = self._config.engine.tensor_parallel_size
        deadline = clock() + CAUSES_WITHIN_S
        while len(conductor.causes) < world_size and clock() < deadline:
            conductor.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(conductor.changed.wait(), deadline - clock())
            if conductor.causes:
                deadline = min(deadline, clock() + MORE_CAUSES_WITHIN_S)
        conductor.changed.set()

    def _expect_next_group(self) -> None:
        """Somebody else starts the ranks: be ready for those they start next.

        All at once, in this order: nothing of the old group can come after the tables are cleared,
        and nothing of the new one before.
        """
        self._link.take_received()
        self._conductor.restart()
        self._link.begin_epoch(self._link.epoch + 1)
        self._options.screen.say("The ranks are gone: waiting for them to be started again")

    # ------------------------------------------------------------------ ranks

    async def _start_ranks(self, run_dir: Path) -> None:
        world_size = self._config.engine.tensor_parallel_size
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if self._launcher is None:
            self._options.screen.say(f"Waiting for {ranks} at {self._link.address}")
            return
        path = run_dir / "config.yaml"
        # The ranks' half only: keys of the API are none of their business.
        path.write_text(ServeConfig(engine=self._config.engine).dump_yaml(), encoding="utf-8")
        self._options.screen.say(f"Starting {ranks}")
        args = [str(path), "--frontend", self._link.address, "--instance-id", self._instance_id]
        await self._launcher.start(world_size, args, run_dir)
        self._watcher = asyncio.ensure_future(self._watch(self._launcher))

    async def _watch(self, launcher: RankLauncher) -> None:
        """The launcher ends when any rank has ended, also one that never said hello."""
        code = await launcher.wait()
        if launcher.failed_rank is not None:
            rank, how = launcher.failed_rank
            self._conductor.losses[rank] = f"rank {rank}: {how}"
        elif not self._conductor.losses:
            self._conductor.losses[0] = f"the ranks' launcher ended with code {code}"
        self._conductor.changed.set()

    def _note_ranks(self) -> None:
        if self._launcher is not None:
            self._launcher.note_family()

    async def _stop_ranks(self) -> None:
        """Tell ranks that serve to stop, and leave none of those this process started."""
        gone = self._conductor.changed.is_set()
        serving = self._conductor.phase in (Phase.READY, Phase.DRAINING) and not gone
        if serving:
            self._conductor.order_shutdown()
        if self._launcher is not None:
            await self._launcher.stop(RANKS_STOP_S if serving else 0.0)

    def _why(self) -> str:
        """Why the ranks do not serve, a line a rank."""
        conductor = self._conductor
        if conductor.fault is not None:
            return conductor.fault
        lines = [
            cause if cause.startswith(f"rank {rank}") else f"rank {rank}: {cause}"
            for rank, cause in sorted(conductor.causes.items())
        ]
        if lines:
            return "\n".join(lines)
        lines = [cause for _, cause in sorted(conductor.losses.items())]
        if self._launcher is not None and self._launcher.last_lines():
            lines += ["Their last lines:", self._launcher.last_lines()]
        return "\n".join(lines)

    # ------------------------------------------------------------------ parts

    def _frontend(self) -> Frontend:
        lora = self._config.engine.lora
        tokenizer = load_tokenizer(self._config.engine.model)
        vision = load_vision_config(self._config.engine.model)
        return Frontend(
            config=self._config,
            conductor=self._conductor,
            served=self._served,
            tokenizer=tokenizer,
            roots=AdapterRoots(() if lora is None else lora.roots),
            images=None if vision is None else ImageReader(vision),
        )

    def _hello(self) -> Hello:
        return Hello(
            role="rank",
            rank=-1,
            world_size=self._config.engine.tensor_parallel_size,
            instance_id=self._instance_id,
            config_digest=self._config.digest(),
            version=VERSION,
            epoch=0,
        )

    def _names(self) -> str:
        adapters = [adapter.key.name for adapter in self._served.adapters()]
        shown = ", ".join(adapters[:8]) + (" …" if len(adapters) > 8 else "")
        base = self._config.base_names[0]
        noun = "adapter" if len(adapters) == 1 else "adapters"
        return f"{base} and {len(adapters)} {noun} ({shown})" if adapters else base

    def _on_rank_line(self, line: str) -> None:
        """A rank's own log. Its errors at start come as reports too, and are shown once."""
        if self._conductor.phase is Phase.STARTING and " ERROR " in line:
            return
        self._options.screen.log(line)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a stop; asking again changes nothing."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _any_set(*events: asyncio.Event) -> None:
    """Until one of ``events`` is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@contextlib.contextmanager
def _run_dir() -> Iterator[Path]:
    """A folder that only this user may enter; it goes when the server ends."""
    path = Path(tempfile.mkdtemp(prefix="mstar-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
