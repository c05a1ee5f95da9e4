"""Many instances behind one address, by Ray Serve: a request goes to one that has its adapter.

    pip install -c constraints.txt -e '.[ray]'
    python launch/ray_serve.py MODEL_DIR|CONFIG.yaml --replicas 4 [flags of mstar-tp serve]

Every replica runs ``mstar-tp serve`` with the same flags, wherever Ray finds as many GPUs as
``--tp`` says (with ``--device cuda``) or as many CPUs. The ingress reads which adapter a request
names and lets Ray route by it, as Serve's model multiplexing does: to a replica that served the
adapter lately, unless all of those are busy. A replica remembers as many as fit its slots, so that
each adapter stays on few replicas while replicas come and go. A replica whose server ends is
replaced; one whose ranks start again keeps its requests.

Adapters are those of the flags, and those that requests name under a root (``--on-demand``):
loading one by a request would reach a single replica, so the ingress refuses that. Every answer
tells in ``x-mstar-replica`` who gave it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

try:
    import aiohttp
    from ray import serve
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is missing: pip install -c constraints.txt -e '.[ray]'")

from mstar_tp.common.errors import ConfigError
from mstar_tp.config.server_flags import add_config_arguments, config_from_args

SERVING = re.compile(r"^Serving .* on (http://\S+)$")
ONE_REPLICA_ONLY = ("v1/load_lora_adapter", "v1/unload_lora_adapter")
HOP_BY_HOP = {
    "connection",
    "content-length",
    "date",
    "host",
    "keep-alive",
    "server",
    "transfer-encoding",
}
NOT_KEPT = {*HOP_BY_HOP, "x-request-id"}
"""Of an answer: Serve's proxy names the request itself, by the name that it passed on."""
REPLICA_HEADER = "x-mstar-replica"
STOP_WITHIN_S = 60.0


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=STOP_WITHIN_S)
class Instance:
    """One ``mstar-tp serve``, and the requests that this replica passes to it."""

    def __init__(self, arguments: Sequence[str], remembered: int) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._started = asyncio.Lock()
        self._output: asyncio.Task[None] | None = None
        # Serve routes by what this function was called with lately, at most ``remembered`` names.
        self._route_here = serve.multiplexed(max_num_models_per_replica=remembered)(_remember)

    async def check_health(self) -> None:
        """Raises RuntimeError: the server has ended, so Serve starts another replica."""
        await self._ready()
        assert self._process is not None
        if self._process.returncode is not None:
            raise RuntimeError(f"mstar-tp serve ended with code {self._process.returncode}")

    async def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, adapter: str
    ) -> AsyncIterator[Any]:
        """First (status, headers), then the answer's body in pieces as they come."""
        session = await self._ready()
        if adapter:
            await self._route_here(adapter)
        async with session.request(method, f"/{path}", headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in NOT_KEPT}
            kept[REPLICA_HEADER] = serve.get_replica_context().replica_id.unique_id
            yield answer.status, kept
            async for piece in answer.content.iter_any():
                yield piece

    async def __del__(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    async def _ready(self) -> aiohttp.ClientSession:
        async with self._started:
            if self._session is None:
                url = await self._start()
                self._session = aiohttp.ClientSession(
                    url,
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                )
            return self._session

    async def _start(self) -> str:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mstar_tp", "serve", *self._arguments),
            *("--host", "127.0.0.1", "--port", "0"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ray caps a replica's threads; the server divides the machine's cores by itself.
            env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = line.decode(errors="replace").rstrip()
            print(said)
            found = SERVING.match(said)
            if found is not None:
                self._output = asyncio.ensure_future(_pass_on(self._process.stdout))
                return found[1]
        code = await self._process.wait()
        raise RuntimeError(f"mstar-tp serve ended with code {code} before it served")


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Ingress:
    """What clients talk to: passes every request to the instance that suits its adapter."""

    def __init__(self, instances: DeploymentHandle[Any], base: Sequence[str]) -> None:
        self._instances = instances
        self._base = frozenset(base)

    async def __call__(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/")
        if path in ONE_REPLICA_ONLY:
            message = (
                f"/{path} would reach one replica of many: put the adapter under the adapters' "
                "root, which all of them read"
            )
            return JSONResponse(
                {"error": {"message": message, "type": "invalid_request_error", "code": None}}, 400
            )
        body = await request.body()
        adapter = adapter_of(body)
        if adapter in self._base:
            adapter = ""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        target = f"{path}?{request.url.query}" if request.url.query else path
        answer = self._instances.options(stream=True, multiplexed_model_id=adapter).request.remote(
            request.method, target, headers, body, adapter
        )
        status, kept = await anext(answer)
        return StreamingResponse(answer, status, kept)


def adapter_of(body: bytes) -> str:
    """The adapter's or the base's name in a request; empty when it names none."""
    try:
        tree = json.loads(body)
    except ValueError:
        return ""  # the server says what is wrong with it
    if not isinstance(tree, dict):
        return ""
    name = tree.get("lora_adapter") or tree.get("model")
    return name if isinstance(name, str) else ""


async def _remember(adapter: str) -> str:
    return adapter


async def _pass_on(output: asyncio.StreamReader) -> None:
    async for line in output:
        print(line.decode(errors="replace").rstrip())


def application(arguments: Sequence[str], replicas: int) -> serve.Application:
    """The Serve application: ``replicas`` instances of ``mstar-tp serve`` with ``arguments``.

    Raises:
        ConfigError: the arguments make no configuration.
    """
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    config = config_from_args(parser.parse_args(arguments))
    engine = config.engine
    on_gpus = engine.device == "cuda"
    tp = engine.tensor_parallel_size
    instances = Instance.options(
        num_replicas=replicas,
        max_ongoing_requests=4 * engine.max_num_seqs,
        ray_actor_options={"num_cpus": 1 if on_gpus else tp, "num_gpus": tp if on_gpus else 0},
    ).bind(list(arguments), max(1, engine.lora.max_loras if engine.lora else 1))
    return Ingress.bind(instances, config.server.served_model_name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", type=int, default=1, help="instances (default 1)")
    parser.add_argument(
        *("--http-host", "--host"),
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where clients connect to (default 127.0.0.1)",
    )
    parser.add_argument(
        *("--http-port", "--port"), type=int, default=8000, metavar="PORT", help="(default 8000)"
    )
    own, arguments = parser.parse_known_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        app = application(arguments, own.replicas)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    serve.start(http_options={"host": own.http_host, "port": own.http_port})
    serve.run(app)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
