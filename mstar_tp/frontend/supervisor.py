"""The supervisor of one frontend process: it listens, keeps ranks serving and stops in order.

``mstar-tp serve`` starts the ranks itself; ``mstar-tp frontend`` waits for ranks that somebody else
starts. Either outlives them. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from mstar_tp.common.errors import MstarError
from mstar_tp.common.run_folder import RunFolder, sweep
from mstar_tp.common.version import VERSION
from mstar_tp.config import ServeConfig
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.access import key_ring
from mstar_tp.frontend.api.app import build_app
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.api.http_server import ApiServer, open_listener, url_of
from mstar_tp.frontend.console import ServerConsole
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.ranks.group_state import Service
from mstar_tp.frontend.ranks.restart_loop import RestartLoop
from mstar_tp.frontend.text.adapter_tokenizers import AdapterTokenizers
from mstar_tp.frontend.text.images import ImageReader
from mstar_tp.frontend.text.tokenizer import load_tokenizer
from mstar_tp.models.config.config_vision import load_vision_config
from mstar_tp.wire.adapter_limits import limits_by
from mstar_tp.wire.channels import Bind, FrontendLink
from mstar_tp.wire.curve import Curve
from mstar_tp.wire.handshake import Hello

if TYPE_CHECKING:
    from mstar_tp.frontend.metrics.traces import Traces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """The options of a frontend process, beside the configuration that ranks share."""

    config: ServeConfig
    bind: str = "ipc"
    instance_id: str | None = None
    """The instance's id; None for a fresh one, which only ranks started by this process know."""
    curve: Curve | None = None
    start_ranks: bool = True
    console: ServerConsole


class Supervisor:
    """The owner of the link, the API server and, where it started them, the ranks."""

    def __init__(self, options: FrontendOptions) -> None:
        self._options = options
        self._config = options.config
        self._instance_id = options.instance_id or secrets.token_hex(8)
        self._stop = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        bind = Bind(options.bind, options.curve, option="--listen")
        self._link = FrontendLink(self._context, bind, self._hello())
        lora = self._config.engine.lora
        self._served = ServedModels(
            self._config.base_names,
            self._config.engine.model,
            {} if lora is None else lora.adapters,
            limits_by(self._config.engine),
        )
        self._roots = AdapterRoots(() if lora is None else lora.all_roots)
        self._keys = key_ring(self._config.server)
        self._state = StateFile(self._config.server.state_file)
        self._conductor = Conductor(
            self._link,
            self._served,
            world_size=self._config.engine.tensor_parallel_size,
            max_queue=self._config.server.max_queue,
            on_progress=options.console.progress,
            state=self._state,
            request_counters=RequestCounters(self._config.server.metrics_adapters),
            fair=self._config.engine.scheduling_policy == "fair",
            leave_s=self._config.server.shutdown_grace_s,
        )
        self._restart_loop = RestartLoop(
            self._config,
            self._link,
            self._conductor,
            options.console,
            start_ranks=options.start_ranks,
            worker_args=self._worker_args,
        )

    async def run(self) -> int:
        """Serve until a signal, or until ranks cannot be started any more.

        Returns the exit code, which is 0 after an orderly stop.

        Raises:
            MstarError: the server cannot start, or cannot go on; its text says why.
        """
        try:
            lora = self._config.engine.lora
            on_demand = lora is not None and lora.on_demand
            self._state.restore(self._served, self._roots, on_demand=on_demand)
            listener = open_listener(self._config.server.host, self._config.server.port)
            with contextlib.closing(listener), self._signals(), _run_dir() as run_dir:
                frontend = self._frontend()
                server = ApiServer(
                    build_app(frontend),
                    listener,
                    check=self._conductor.check_capacity,
                    refused=self._conductor.requests.request_counters.refused,
                )
                traces = self._traces()
                self._link.start()
                try:
                    async with frontend.watching():
                        return await self._serve(server, url_of(listener), run_dir)
                finally:
                    self._link.close()
                    if traces is not None:
                        await asyncio.to_thread(traces.close)
        finally:
            self._context.term()

    # ------------------------------------------------------------------ phases

    async def _serve(self, server: ApiServer, url: str, run_dir: Path) -> int:
        router = asyncio.ensure_future(self._conductor.run())
        server.start()
        served = False

        def on_serving() -> None:
            nonlocal served
            served = True
            self._options.console.say(f"Serving {self._names()} on {url}")

        keeping = asyncio.ensure_future(self._restart_loop.run(run_dir, on_serving))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not keeping.done():
                await self._drain(keeping)
            if keeping.done():
                return self._ended(keeping, served)
            return 0 if self._conductor.state.causes.fault is None else 1
        finally:
            stopping.cancel()
            keeping.cancel()
            await asyncio.wait({keeping})
            await self._restart_loop.stop()
            await server.stop()
            await self._state.saved()
            router.cancel()

    async def _drain(self, keeping: asyncio.Future[None]) -> None:
        """Let running requests end within the grace time, and end the others with an error."""
        conductor, grace_s = self._conductor, self._config.server.shutdown_grace_s
        conductor.group.begin_draining()
        if conductor.requests and conductor.state.service in (Service.READY, Service.DOWN):
            count = len(conductor.requests)
            running = f"{count} running request{' gets' if count == 1 else 's get'}"
            self._options.console.say(f"Stopping: {running} {grace_s:g} s to finish")
            idle = asyncio.ensure_future(conductor.requests.idle.wait())
            ends: list[asyncio.Future[Any]] = [idle, keeping]
            await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            if left := len(conductor.requests):
                logger.warning("%d requests did not end in time: they end with an error", left)
        conductor.group.fail_all("the server is shutting down before this request could finish")

    def _ended(self, keeping: asyncio.Future[None], served: bool) -> int:
        """Return the exit code after ranks could not be started any more.

        Raises:
            MstarError: the server never served; its text says why.
        """
        error = keeping.exception()
        assert error is not None, "it is cancelled or fails"
        if served and isinstance(error, MstarError):
            self._options.console.log(f"error: {error}")
            return 0 if self._stop.is_set() and self._conductor.state.causes.fault is None else 1
        raise error

    def _worker_args(self, run_dir: Path) -> list[str]:
        path = run_dir / "config.yaml"
        if not path.exists():
            # The ranks' half only: keys of the API are none of their business.
            ranks = ServeConfig(engine=self._config.engine)
            path.write_text(ranks.dump_yaml(), encoding="utf-8")
        form = self._config.server.log_format
        return [
            *(str(path), "--frontend", self._link.address, "--instance-id", self._instance_id),
            *("--log-format", form),
        ]

    # ------------------------------------------------------------------ parts

    def _frontend(self) -> Frontend:
        # First of all: a folder that has none is no model's, whatever else it lacks.
        tokenizer = load_tokenizer(self._config.engine.model)
        vision = load_vision_config(self._config.engine.model)
        own = AdapterTokenizers(tokenizer, self._config.engine.model)
        for adapter in self._served.adapters():
            if adapter.key in self._served.configured:
                own.read(adapter.key.name, adapter.path, configured=True)
        return Frontend(
            config=self._config,
            conductor=self._conductor,
            served=self._served,
            tokenizer=tokenizer,
            roots=self._roots,
            state=self._state,
            keys=self._keys,
            images=None if vision is None else ImageReader(vision),
        )

    def _traces(self) -> Traces | None:
        """Return the maker of traces, told of every request's end; None where none are wanted."""
        endpoint = self._config.server.otlp_traces_endpoint
        if endpoint is None:
            return None
        # Imported here: without traces no part of OpenTelemetry is.
        from mstar_tp.frontend.metrics.traces import Traces

        traces = Traces(endpoint, self._config.base_names[0])
        self._conductor.requests.on_ended.append(traces.ended)
        return traces

    def _hello(self) -> Hello:
        return Hello(
            role="rank",
            rank=-1,
            world_size=self._config.engine.tensor_parallel_size,
            instance_id=self._instance_id,
            config_digest=self._config.digest(),
            version=VERSION,
        )

    def _names(self) -> str:
        adapters = [adapter.key.name for adapter in self._served.adapters()]
        shown = ", ".join(adapters[:8]) + (" …" if len(adapters) > 8 else "")
        base = self._config.base_names[0]
        noun = "adapter" if len(adapters) == 1 else "adapters"
        return f"{base} and {len(adapters)} {noun} ({shown})" if adapters else base

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info("%s: %s", number.name, self._waits_for())
        self._stop.set()

    def _waits_for(self) -> str:
        """Return what a server that was told to stop waits for, for the log."""
        conductor, grace_s = self._conductor, self._config.server.shutdown_grace_s
        if conductor.state.service is Service.STARTING:
            return "stopping while the ranks start: they are ended now"
        count = len(conductor.requests)
        if not count:
            return "stopping: no request runs, the ranks are told to stop"
        return (
            f"stopping: no request is taken any more, {count} "
            f"{'requests that run get' if count > 1 else 'request that runs gets'} {grace_s:g} s "
            "to end, then the ranks are told to stop"
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT as the wish to stop; asking again changes nothing."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


@contextlib.contextmanager
def _run_dir() -> Iterator[Path]:
    """Make a folder that only this user may enter; it goes when the server ends."""
    sweep()
    folder = RunFolder()
    try:
        yield folder.path
    finally:
        folder.close()
