"""The real API over real sockets, in front of ranks that follow a script: no model, no torch.

``FakeRanks`` speak the conductor channel as ranks do; what they answer is a function of the request
that a test may replace. ``Api`` runs the frontend's parts on an event loop of its own, reachable
through HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai
import zmq

from mstar_tp.config import build_config
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.access import key_ring
from mstar_tp.frontend.api.app import build_app
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.api.http_server import ApiServer, open_listener, url_of
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from mstar_tp.wire.adapter_limits import limits_by
from mstar_tp.wire.channels import Bind, ConductorLink, FrontendLink
from mstar_tp.wire.commands import (
    Abort,
    ConductorMessage,
    Inspect,
    Load,
    LoadCommit,
    Locate,
    Measure,
    NewRequest,
    Shutdown,
    Validate,
)
from mstar_tp.wire.handshake import Hello
from mstar_tp.wire.reports import (
    AdapterDigest,
    Fatal,
    LoadDone,
    LoadResult,
    RankReport,
    Ready,
    RequestFailed,
    Token,
    TokenLogprobs,
    Tokens,
    Validated,
)
from mstar_tp.wire.schedule import Checks
from mstar_tp.wire.states import (
    AdapterState,
    CpuCacheState,
    KvHostState,
    Located,
    LoraStats,
    PlaceCounts,
    RankStats,
    StateReport,
)
from mstar_tp.wire.stats import PrefixStats
from mstar_tp.wire.values import AdapterKey
from support.frontend_kit import byte_level_folder

T = TypeVar("T")
GUARD_S = 120.0
WORLD_SIZE = 2
CONTEXT = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Script = Callable[[NewRequest], list[int]]
Places = Callable[[int, AdapterKey], tuple[AdapterState, ...]]


def scripted(request: NewRequest) -> list[int]:
    """Ids that depend on prompt and adapter, and on the seed when the request samples."""
    params = request.params
    seed = params.seed if params.temperature > 0 else None
    draw = random.Random(f"{request.prompt} {request.adapter} {seed}")
    return [draw.randrange(4, 260) for _ in range(CONTEXT)]


def nowhere(rank: int, key: AdapterKey) -> tuple[AdapterState, ...]:
    return ()


class FakeRanks:
    """``WORLD_SIZE`` threads, one a rank. Rank 0 answers requests, a token each a step."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        prepare: Callable[[FakeRanks], None] = lambda ranks: None,
        context: int = CONTEXT,
    ) -> None:
        """``prepare`` is called before any of them says hello."""
        self._context_len = context
        self.script: Script = scripted
        self.refusals: dict[int, str] = {}
        """rank -> why it refuses the loads to come."""
        self.lora_ranks: dict[int, int] = {}
        """rank -> the adapter rank it finds in files to come; 0 unless given."""
        self.commit_cause: str | None = None
        self.silent: set[int] = set()
        """Ranks that answer no Measure."""
        self.fail: Callable[[NewRequest], str | None] = lambda request: None
        self.places: Places = nowhere
        """What a rank says in its figures of an adapter."""
        self.fault_of: str | None = None
        """The field of failing requests that is at fault."""
        self.chosen: Callable[[NewRequest], float] = lambda request: -0.25
        """The log probability of every token of a request."""
        self.seen: list[list[ConductorMessage]] = [[] for _ in range(WORLD_SIZE)]
        self._changed = threading.Condition()
        self._credit: int | None = None
        self._loads_held = False
        self._killed = threading.Event()
        self._links: dict[int, ConductorLink] = {}
        self._group = secrets.token_hex(8)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads = [
            threading.Thread(target=self._run, args=(rank, address, hello), daemon=True)
            for rank in range(WORLD_SIZE)
        ]
        prepare(self)
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ a test's side

    def hold(self, steps: int = 0) -> None:
        """Make ``steps`` more steps, then none until ``go``."""
        with self._changed:
            self._credit = steps

    def go(self) -> None:
        with self._changed:
            self._credit = None
            self._loads_held = False

    def withhold_loads(self) -> None:
        """Give no verdict on loads until ``go``."""
        with self._changed:
            self._loads_held = True

    def messages(self, kind: type[T], rank: int = 0) -> list[T]:
        with self._changed:
            return [message for message in self.seen[rank] if isinstance(message, kind)]

    def wait_for(self, kind: type[T], count: int = 1, rank: int = 0) -> list[T]:
        """Until rank ``rank`` has got ``count`` messages of ``kind``."""

        def enough() -> bool:
            return len([m for m in self.seen[rank] if isinstance(m, kind)]) >= count

        with self._changed:
            assert self._changed.wait_for(enough, GUARD_S), f"no {count} {kind.__name__} came"
        return self.messages(kind, rank)

    def reset(self) -> None:
        with self._changed:
            self.script = scripted
            self.refusals = {}
            self.lora_ranks = {}
            self.commit_cause = None
            self.silent = set()
            self.fail = lambda request: None
            self.places = nowhere
            self.fault_of = None
            self.chosen = lambda request: -0.25
            self._credit = None
            self._loads_held = False
            for seen in self.seen:
                seen.clear()

    def report(self, rank: int, report: RankReport) -> None:
        self._links[rank].send(report)

    def kill(self) -> None:
        """All ranks break off without a word."""
        self._killed.set()
        for thread in self._threads:
            thread.join(GUARD_S)
        self._context.term()

    # ------------------------------------------------------------------ a rank's side

    def _run(self, rank: int, address: str, hello: Hello) -> None:
        own = msgspec.structs.replace(hello, rank=rank, group=self._group)
        link = ConductorLink(self._context, address, own)
        link.start(GUARD_S)
        self._links[rank] = link
        ready = Ready(
            rank=rank,
            vocab_size=320,
            max_model_len=self._context_len,
            num_pages=8,
            page_size=16,
            eos_token_ids=(1,),
            targets=(),
        )
        link.send(ready)
        _FakeRank(self, rank, link).loop()
        link.close()


class _FakeRank:
    def __init__(self, ranks: FakeRanks, rank: int, link: ConductorLink) -> None:
        self._ranks = ranks
        self._rank = rank
        self._link = link
        self._live: dict[int, tuple[NewRequest, list[int], int]] = {}
        self._loads: list[Load] = []
        self._by_id: dict[int, Load] = {}
        self._tp_seq = -1
        self._stopping = False

    def loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.poll_socket, zmq.POLLIN)
        while not self._stopping and not self._ranks._killed.is_set():
            poller.poll(1 if self._live and self._rank == 0 else 20)
            for message in self._link.receive():
                self._take(message)
                with self._ranks._changed:
                    self._ranks.seen[self._rank].append(message)
                    self._ranks._changed.notify_all()
            if self._link.lost is not None:
                return
            self._validate_loads()
            if self._rank == 0:
                self._step()

    def _take(self, message: ConductorMessage) -> None:
        match message:
            case NewRequest(rid=rid):
                cause = self._ranks.fail(message)
                if cause is None:
                    done = len(message.output)
                    self._live[rid] = (message, self._ranks.script(message), done)
                elif self._rank == 0:
                    self._link.send(RequestFailed(rid=rid, cause=cause, param=self._ranks.fault_of))
            case Abort(rid=rid):
                self._live.pop(rid, None)
            case Load():
                self._loads.append(message)
                self._by_id[message.load_id] = message
            case LoadCommit(load_id=load_id) if self._rank == 0:
                cause = self._ranks.commit_cause
                self._link.send(LoadDone(load_id=load_id, cause=cause))
                digest = f"digest of {self._by_id[load_id].key}"
                self._link.send(AdapterDigest(key=self._by_id[load_id].key, digest=digest))
            case Inspect(query_id=query_id):
                self._link.send(self._report(query_id))
            case Locate(query_id=query_id, adapters=keys):
                slots = {key: number for number, key in enumerate(keys, start=1)}
                found = tuple(
                    AdapterState(adapter=key, slot=slots[key] if key.generation else None)
                    for key in keys
                )
                self._link.send(Located(rank=self._rank, query_id=query_id, adapters=found))
            case Validate(query_id=query_id):
                cause = self._ranks.refusals.get(self._rank)
                self._link.send(
                    Validated(
                        rank=self._rank,
                        query_id=query_id,
                        problems=() if cause is None else (cause,),
                        warnings=("a bias has no effect",),
                        lora_rank=self._ranks.lora_ranks.get(self._rank, 8),
                        targets=("q_proj",),
                        num_bytes=100 + self._rank,
                    )
                )
            case Measure() if self._rank not in self._ranks.silent:
                self._link.send(self._stats(message))
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _validate_loads(self) -> None:
        with self._ranks._changed:
            if self._ranks._loads_held:
                return
        loads, self._loads = self._loads, []
        for load in loads:
            cause = self._ranks.refusals.get(self._rank)
            self._link.send(
                LoadResult(
                    rank=self._rank,
                    load_id=load.load_id,
                    cause=cause,
                    lora_rank=self._ranks.lora_ranks.get(self._rank, 0),
                )
            )

    def _step(self) -> None:
        with self._ranks._changed:
            if not self._live or self._ranks._credit == 0:
                return
            if self._ranks._credit is not None:
                self._ranks._credit -= 1
        self._tp_seq += 1
        tokens = tuple(self._next(rid) for rid in list(self._live))
        self._link.send(Tokens(tp_seq=self._tp_seq, tokens=tokens))

    def _next(self, rid: int) -> Token:
        request, ids, done = self._live[rid]
        token, params = ids[done], request.params
        finish = None
        if token in params.stop_token_ids and done + 1 > params.min_tokens:
            finish = "stop"
        elif done + 1 >= params.max_tokens:
            finish = "length"
        if finish is None:
            self._live[rid] = (request, ids, done + 1)
        else:
            del self._live[rid]
        slot = 0 if request.adapter is None else 3
        return Token(
            rid=rid,
            token=token,
            finish=finish,
            slot=slot,
            queued_us=7 if done == 0 else None,
            logprobs=_logprobs(token, params.logprobs, self._ranks.chosen(request)),
            prompt_logprobs=_prompt_logprobs(request) if done == 0 else (),
        )

    def _report(self, query_id: int) -> StateReport:
        return StateReport(
            rank=self._rank,
            query_id=query_id,
            requests=tuple(self._live),
            pages_used=0,
            pages_total=8,
            slots=(),
            cpu_cache=(),
            served=(),
            host=None,
            failed_reads=(),
            waiting=0,
            running=len(self._live),
            steps=self._tp_seq + 1,
            steps_waited_for_read=0,
            gap_us=0,
            preemptions=0,
            checks=Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0),
        )

    def _stats(self, asked: Measure) -> RankStats:
        """Numbers that differ from each other and between ranks."""
        base = 100 * (1 + self._rank)
        lora = LoraStats(
            slots=base + 1,
            slots_held=base + 2,
            evictions=base + 3,
            agreed_failures=base + 4,
            steps_waited_for_read=base + 5,
            adapters_held=base + 9,
            adapters_taken=base + 19,
            places=PlaceCounts(
                device=base + 31,
                host=base + 32,
                reading=base + 33,
                disk=base + 34,
                failed=base + 35,
            ),
            cpu_cache=CpuCacheState(
                unit="adapters",
                capacity=base + 6,
                used=base + 7,
                peak=base + 8,
                memory_bytes=base + 10,
                peak_bytes=base + 11,
            ),
        )
        return RankStats(
            rank=self._rank,
            query_id=asked.query_id,
            steps=base + 12,
            preemptions=base + 13,
            waiting=base + 14,
            running=base + 15,
            requests=base + 16,
            pages_used=base + 17,
            pages_total=base + 18,
            lora=(lora,),
            kv_host=KvHostState(
                pages_used=base + 20,
                pages_total=base + 21,
                offloads=base + 22,
                reloads=base + 23,
                offloaded_bytes=base + 24,
                reloaded_bytes=base + 25,
                recomputed_tokens=base + 26,
            ),
            prefix=PrefixStats(
                tokens_queried=base + 27,
                tokens_cached=base + 28,
                pages=base + 29,
                evictions=base + 30,
            ),
            adapters=tuple(
                state for key in asked.adapters for state in self._ranks.places(self._rank, key)
            ),
        )


def _prompt_logprobs(request: NewRequest) -> tuple[TokenLogprobs, ...]:
    count = request.params.prompt_logprobs
    told = [_logprobs(token, count) for token in request.prompt[1:]]
    return tuple(each for each in told if each is not None)


def _logprobs(token: int, count: int | None, chosen: float = -0.25) -> TokenLogprobs | None:
    if count is None:
        return None
    others = [token, *(id_ for id_ in range(4, 320) if id_ != token)][:count]
    top = tuple(-0.25 - place for place in range(count))
    return TokenLogprobs(chosen=chosen, top_ids=tuple(others), top=top)


class Api:
    """One served frontend with its fake ranks."""

    def __init__(
        self,
        folder: Path,
        *,
        bos: bool = False,
        chat: str | None = CHAT_TEMPLATE,
        policy: str = "fcfs",
        context: int = CONTEXT,
        on_demand: int = 0,
        limits: Mapping[str, Any] | None = None,
        **server: Any,
    ):
        """Build it; requests may load ``on_demand`` adapters of the folder ``roots``."""
        self._context_len = context
        model = folder / "model"
        byte_level_folder(model, **({} if chat is None else {"chat_template": chat}))
        if bos:
            _add_start_token(model)
        self.roots = folder / "adapters"
        (self.roots / "extra").mkdir(parents=True)
        adapters = {"pirate": str(self.roots / "pirate")}
        lora: dict[str, Any] = {"adapters": adapters, "roots": [str(self.roots)]}
        lora |= limits or {}
        if on_demand:
            lora |= {"adapters_root": str(self.roots), "on_demand": True}
            lora["max_on_demand"] = on_demand
        engine = {
            "model": str(model),
            "tensor_parallel_size": WORLD_SIZE,
            "scheduling_policy": policy,
            "lora": lora,
        }
        names = {"served_model_name": ["tiny", "alias"]}
        tree = {"engine": engine, "server": names | server}
        self.config = build_config(tree, source="test")
        self.tokenizer: TextTokenizer = load_tokenizer(model)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start())

    def run(self, work: Awaitable[T] | Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the frontend's loop."""

        async def do() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result(GUARD_S)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def token_ids(self, data: bytes) -> list[int]:
        """Ids whose bytes, one a token, are ``data``."""
        by_byte = {self.tokenizer.token_bytes(i): i for i in range(259, 3, -1)}
        return [by_byte[bytes([byte])] for byte in data]

    def answer(self, data: bytes | str, then: int | None = None) -> None:
        """Every request from now on is answered with ``data``, then token ``then`` for ever."""
        raw = data.encode() if isinstance(data, str) else data
        fill = self.token_ids(b"~")[0] if then is None else then
        ids = self.token_ids(raw) + [fill] * self._context_len
        self.ranks.script = lambda request: ids

    def client(self, **options: Any) -> openai.OpenAI:
        key = options.pop("api_key", "none")
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=GUARD_S, **options
        )

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=GUARD_S, **options)

    @contextmanager
    def leaver(self, body: dict[str, Any]) -> Iterator[socket.socket]:
        """A client that has sent a completion request, and goes away at the end of the block."""
        data = json.dumps(body).encode()
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), GUARD_S) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % len(data) + data)
            yield client

    async def _start(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hello = hello = Hello(
            role="rank",
            rank=-1,
            world_size=WORLD_SIZE,
            instance_id="test",
            config_digest=self.config.digest(),
            version="1",
        )
        self._link = FrontendLink(self._context, Bind("ipc"), hello)
        self._link.start()
        lora = self.config.engine.lora
        assert lora is not None
        served = ServedModels(
            self.config.base_names,
            self.config.engine.model,
            lora.adapters,
            limits_by(self.config.engine),
        )
        self.conductor = Conductor(
            self._link,
            served,
            world_size=WORLD_SIZE,
            max_queue=self.config.server.max_queue,
            state=(state := StateFile(self.config.server.state_file)),
            fair=self.config.engine.scheduling_policy == "fair",
            leave_s=self.config.server.shutdown_grace_s,
        )
        self.served = served
        self._router = asyncio.ensure_future(self.conductor.run())
        listener = open_listener("127.0.0.1", 0)
        self.url = url_of(listener)
        self.frontend = frontend = Frontend(
            config=self.config,
            conductor=self.conductor,
            served=served,
            tokenizer=self.tokenizer,
            roots=AdapterRoots(lora.all_roots),
            keys=key_ring(self.config.server),
            state=state,
        )
        self._server = ApiServer(
            build_app(frontend),
            listener,
            check=self.conductor.check_capacity,
            refused=self.conductor.requests.request_counters.refused,
        )
        self._server.start()
        self.ranks = FakeRanks(self._link.address, hello, context=self._context_len)
        await asyncio.wait_for(self.conductor.group.became_ready.wait(), GUARD_S)

    def lose_ranks(self, cause: str = "out of memory in step 7") -> FakeRanks:
        """The ranks are gone, and the frontend expects others; those that were."""

        async def lose() -> None:
            fatal = Fatal(rank=1, error="PeerLostError", cause=cause)
            self.conductor.group.take(1, fatal)
            self._link.take_received()
            self.conductor.group.await_next()
            self._link.begin_epoch()

        self.run(lose())
        self.ranks.kill()
        return self.ranks

    def start_ranks(self, prepare: Callable[[FakeRanks], None] = lambda ranks: None) -> None:
        """The next group of ranks, which is ready when this returns."""
        self.ranks = FakeRanks(self._link.address, self._hello, prepare)
        self.run(asyncio.wait_for(self.conductor.group.became_ready.wait(), GUARD_S))

    def close(self) -> None:
        self.run(self._stop())
        self.ranks.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GUARD_S)
        self.loop.close()

    async def _stop(self) -> None:
        self.conductor.group.fail_all("the test is over")
        self.conductor.group.send_shutdown()
        await self._server.stop()
        self._router.cancel()
        self._link.close()
        self._context.term()


def _add_start_token(model: Path) -> None:
    from tokenizers import Tokenizer, processors

    file = str(model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.Sequence(
        [
            tokenizer.post_processor or processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    tokenizer.save(file)
