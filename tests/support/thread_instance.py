"""A whole instance in one process: the real loops, tables, pools and steps of 2 to 8 ranks.

Their threads run one at a time, and their messages and reads arrive as a seed says.

Only these are fakes: the channels (``wires``), the conductor, which is this module, the model
and the readers' threads (``code_model``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from mstar_tp.engine.resources.kv.host_copies import HostCopies
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.kv.prefix import FingerprintOf, PrefixNames
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.layers.attention.attention import KVCache
from mstar_tp.lora.device.device_copies import OneQueue
from mstar_tp.recording import NO_RECORDING, Recorder
from mstar_tp.testing.lora_files import STANDARD, pair, q_pairs, write_adapter
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.commands import (
    Abort,
    ConductorMessage,
    Load,
    LoadAbort,
    LoadCommit,
    NewRequest,
    Shutdown,
    Unload,
)
from mstar_tp.wire.reports import CopyIn, LoadDone, LoadResult, RankReport, RequestFailed, Tokens
from mstar_tp.wire.schedule import ScheduleEntry
from mstar_tp.wire.states import StateReport
from mstar_tp.wire.values import AdapterKey, ImageInput, SamplingParams
from support.code_model import (
    CODES,
    HIDDEN,
    IMAGE_TOKENS,
    SCALE,
    VISION_MODULE,
    code_spec,
    vision_spec,
)
from support.interleaving import (
    InterleavedGroups,
    Interleaving,
)
from support.thread_channels import Wire
from support.thread_rank import ThreadRank

VISION_ONLY, LANGUAGE_ONLY = "e", "d"
"""The names of adapters that change one stage alone, where there are two."""
LARGE = "def"
"""Adapters of these names change one linear more, and take more memory, than the others."""


@dataclass(slots=True)
class Ending:
    """The end of a request for its client: "stop", "length", "failed" or "aborted"."""

    how: str
    cause: str = ""
    tokens: int = 0


class ThreadInstance:
    """Ranks, channels and a conductor. Everything is called on the test's own thread."""

    # One argument for each size that tests vary.
    def __init__(
        self,
        folder: Path,
        *,
        world_size: int = 2,
        slots: int = 2,
        cpu_capacity: int = 3,
        in_bytes: bool = False,
        num_pages: int = 8,
        page_size: int = 2,
        num_host_pages: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 8,
        fine: bool = False,
        overlap: bool = True,
        vision_slots: int | None = None,
        deferred: bool = False,
        prefix_caching: bool = True,
        limits: Mapping[str | None, AdapterLimits] | None = None,
        fair: bool = False,
    ) -> None:
        """``vision_slots``: of a second node, which encodes images before the decoder runs.
        ``limits``: what adapters may take, by name, and the base model; ``fair``: whether they take
        turns.
        ``deferred``: tokens stay on the device while the next step is launched, as on GPUs.
        """
        self.limits, self.fair = limits or {}, fair
        self.deferred = deferred
        self._prefix_caching = prefix_caching
        torch.set_num_threads(1)
        self.folder = folder
        self.world_size = world_size
        self.fine = fine
        self.overlap = overlap
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = num_pages * page_size
        self._num_pages, self._page_size = num_pages, page_size
        self._num_host_pages = num_host_pages
        self.spec = code_spec(world_size, slots=slots, cpu_capacity=slots).apply_yaml_overrides(
            {"cpu_capacity": cpu_capacity, "cpu_unit": "bytes" if in_bytes else "adapters"}
        )
        self.specs = [self.spec]
        self.stages: list[tuple[str, int | None]] = [("", None)]
        """A node's name, and how many tokens of an image it runs."""
        if vision_slots is not None:
            sizes = {"slots": vision_slots, "cpu_capacity": vision_slots + 1}
            self.specs = [vision_spec(world_size, **sizes), self.spec]
            self.stages = [("vision", IMAGE_TOKENS), ("language", None)]
        self.interleaving = Interleaving()
        self.groups = InterleavedGroups(self.interleaving, world_size)
        everyone, followers = range(world_size), range(1, world_size)
        self.commands: list[Wire[ConductorMessage]] = [Wire(f"bodies-{r}") for r in everyone]
        self.reports: list[Wire[RankReport]] = [Wire(f"reports-{r}") for r in everyone]
        self.entries: list[Wire[ScheduleEntry]] = [Wire(f"order-{r}") for r in followers]
        self.copies: list[Wire[CopyIn]] = [Wire(f"copies-{r}") for r in followers]
        self.stalled: set[int] = set()
        """Ranks whose reads end only later."""
        self.withheld: set[str] = set()
        """What happens only later: wires and threads by name."""
        self.configured: list[AdapterKey] = []
        self.served: dict[str, AdapterKey] = {}
        self.unequal: set[AdapterKey] = set()
        """Adapters with other weights on one rank."""
        self.codes: dict[AdapterKey, int] = {}
        self.endings: dict[int, Ending] = {}
        self.live: dict[int, AdapterKey | None] = {}
        self.tokens: dict[int, int] = {}
        self.adapter_of: dict[int, AdapterKey | None] = {}
        self.with_images: set[int] = set()
        self._loads: dict[int, tuple[AdapterKey, list[LoadResult]]] = {}
        self._in_place: set[int] = set()
        self.replaced: list[AdapterKey] = []
        """Adapters that others were loaded in place of."""
        self.load_causes: dict[int, str | None] = {}
        self.states: dict[int, dict[int, StateReport]] = {}
        """inspection -> rank -> its answer."""
        self._next = 0
        self.ranks = [ThreadRank(self, rank) for rank in everyone]

    def recorder_of(self, rank: int) -> Recorder:
        return NO_RECORDING

    def new_requests(self) -> RequestTable:
        return RequestTable(self.max_model_len)

    def new_cache(self) -> KVCache:
        """A layer's; what was never written is no token at no place."""
        sizes = self._num_pages, self._page_size, 1, 1
        cache = KVCache.allocate(*sizes, torch.float32, torch.device("cpu"))
        cache.k.fill_(-1)
        cache.v.fill_(-1)
        return cache

    def new_kv(
        self,
        requests: RequestTable,
        cache: KVCache,
        fingerprint_of: FingerprintOf,
        recorder: Recorder,
    ) -> KvPool:
        table, names = PageTable(self._num_pages, self._page_size), None
        if self._prefix_caching:
            names = PrefixNames(requests, self._page_size, "codes", fingerprint_of, recorder)
        copies = HostCopies([cache], self._num_host_pages, OneQueue())
        offload = KvOffload(HostPages(self._num_host_pages), copies)
        return KvPool(table, lambda rid: requests[rid].expected, offload, names)

    # ------------------------------------------------------------------ adapters on disk

    def path(self, key: AdapterKey, rank: int) -> Path:
        return self.folder / f"{key.name}-{key.generation}" / str(rank)

    def write(self, key: AdapterKey, code: int, ranks: Iterable[int] | None = None) -> None:
        """Put an adapter's files on disk, one copy a rank."""
        for rank in range(self.world_size) if ranks is None else ranks:
            tensors: dict[str, torch.Tensor] = {}
            if self.changes(key, -1):
                tensors |= q_pairs(self.spec, b=SCALE * code)
            if self.changes(key, -1) and key.name in LARGE:
                name = STANDARD.format(layer=0, module="self_attn.o_proj")
                tensors |= pair(name, 2 * self.world_size, HIDDEN)
            if len(self.specs) > 1 and self.changes(key, 0):
                tensors |= pair(VISION_MODULE, HIDDEN, 2 * self.world_size, b=SCALE * code)
            write_adapter(self.path(key, rank), tensors)

    def changes(self, key: AdapterKey, stage: int) -> bool:
        """True if an adapter changes stage ``stage``; with two, some change one alone."""
        if len(self.specs) == 1:
            return True
        return key.name not in (VISION_ONLY if self.stages[stage][1] is None else LANGUAGE_ONLY)

    def asks(self, rid: int, key: AdapterKey | None, stage: int) -> AdapterKey | None:
        """The adapter that a request runs on in the ``stage``-th node; None where it needs none."""
        if key is None or not self.changes(key, stage):
            return None
        of_images = self.stages[stage][1] is not None
        return key if not of_images or rid in self.with_images else None

    def code_of(self, rid: int, key: AdapterKey | None, stage: int) -> int:
        """The adapter's code for the request's tokens there."""
        asked = self.asks(rid, key, stage)
        return 0 if asked is None else self.codes[asked]

    def start(self, *names: str) -> list[AdapterKey]:
        """Serve ``names`` from the start and set every thread going."""
        keys = self.configured = [AdapterKey(name, 0) for name in names]
        for key in keys:
            self._give_code(key)
            self.write(key, self.codes[key])
            self.served[key.name] = key
        for rank in self.ranks:
            rank.lora.loads.preload(
                [(key, str(self.path(key, rank.rank))) for key in keys],
                limits={key: self.limits_of(key) for key in keys},
            )
            rank.steps.start()
            self.interleaving.start(f"main-{rank.rank}", rank.loop.run)
        return keys

    def limits_of(self, key: AdapterKey | None) -> AdapterLimits:
        """The limits of an adapter, or of the base model."""
        return self.limits.get(None if key is None else key.name, NO_LIMITS)

    def _give_code(self, key: AdapterKey) -> None:
        self.codes[key] = len(self.codes) % CODES + 1

    @property
    def bad_reads(self) -> set[AdapterKey]:
        """Adapters of which some rank's read failed or yielded other weights."""
        failed = [readers.failed for rank in self.ranks for readers in rank.readers]
        return self.unequal.union(*failed)

    # ------------------------------------------------------------------ the conductor

    def submit(
        self, key: AdapterKey | None, prompt: int = 1, images: int = 0, **params: Any
    ) -> int:
        """Send a request to every rank; its number.

        The first ``images`` of the tokens of ``prompt`` are images.
        """
        rid = self._number()
        if images:
            self.with_images.add(rid)
        code = self.code_of(rid, key, -1)
        self.live[rid] = self.adapter_of[rid] = key
        self.tokens[rid] = 0
        params = {"max_tokens": 2, "temperature": 0.0, **params}
        sampling = SamplingParams(**params)
        seen = bytes([self.code_of(rid, key, 0)]) if images else b""
        self._broadcast(
            NewRequest(
                rid=rid,
                prompt=(code,) * prompt,
                params=sampling,
                adapter=key,
                images=tuple(
                    ImageInput(start=place, num_tokens=1, pixels=seen) for place in range(images)
                ),
            )
        )
        return rid

    def abort(self, rid: int) -> None:
        """The client of a request leaves; one that has ended stays as it ended."""
        self._end(rid, Ending("aborted"))
        self._broadcast(Abort(rid=rid))

    def load(
        self, key: AdapterKey, *, differs_on: int | None = None, in_place: bool = False
    ) -> int:
        """Load an adapter at run time, ``in_place`` of one that is served; the load's number.

        Rank ``differs_on`` finds other weights.
        """
        self._give_code(key)
        self.write(key, self.codes[key])
        if differs_on is not None:
            self.unequal.add(key)
            self.write(key, self.codes[key] % CODES + 1, [differs_on])
        load_id = self._number()
        self._loads[load_id] = key, []
        if in_place:
            self._in_place.add(load_id)
        for rank in range(self.world_size):
            path = str(self.path(key, rank))
            limits = self.limits_of(key)
            self.commands[rank].send(Load(load_id=load_id, key=key, path=path, limits=limits))
        return load_id

    def unload(self, key: AdapterKey) -> None:
        if self.served.get(key.name) == key:
            del self.served[key.name]
        self._broadcast(Unload(key=key))

    def shut_down(self) -> None:
        self._broadcast(Shutdown())

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _broadcast(self, message: ConductorMessage) -> None:
        for wire in self.commands:
            wire.send(message)

    def _take_report(self, rank: int) -> None:
        self.reports[rank].arrive()
        for report in self.reports[rank].take():
            match report:
                case Tokens():
                    self._take_tokens(report)
                case RequestFailed(rid=rid, cause=cause):
                    self._end(rid, Ending("failed", cause))
                case LoadResult(load_id=load_id):
                    self._answer_load(load_id, report)
                case LoadDone(load_id=load_id, cause=cause):
                    self.load_causes[load_id] = cause
                    if cause is None:
                        self._serve(load_id)
                case StateReport(query_id=query_id):
                    self.states.setdefault(query_id, {})[rank] = report
                case _:
                    pass

    def _serve(self, load_id: int) -> None:
        """The leader has applied a commit."""
        key = self._loads[load_id][0]
        old = self.served.get(key.name)
        self.served[key.name] = key
        if old is not None:
            self.replaced.append(old)
            self._broadcast(Unload(key=old))

    def _take_tokens(self, report: Tokens) -> None:
        for token in report.tokens:
            if token.rid not in self.live:
                continue
            key = self.live[token.rid]
            code = self.code_of(token.rid, key, -1)
            assert token.token == code, f"request {token.rid} on {key} got a token of {token.token}"
            self.tokens[token.rid] += 1
            if token.finish is not None:
                self._end(token.rid, Ending(token.finish))

    def _end(self, rid: int, ending: Ending) -> None:
        if rid in self.live:
            del self.live[rid]
            ending.tokens = self.tokens[rid]
            self.endings[rid] = ending

    def _answer_load(self, load_id: int, result: LoadResult) -> None:
        _, results = self._loads[load_id]
        results.append(result)
        if len(results) == self.world_size:
            causes = [r.cause for r in results if r.cause is not None]
            if causes:
                self.load_causes[load_id] = causes[0]
                self._broadcast(LoadAbort(load_id=load_id))
            else:
                old = self.served.get(self._loads[load_id][0].name)
                replaces = old if load_id in self._in_place else None
                self._broadcast(LoadCommit(load_id=load_id, replaces=replaces))

    # ------------------------------------------------------------------ what happens next

    def choices(self) -> list[tuple[str, Callable[[], None]]]:
        """Everything that could happen next, by who does it."""
        stalled = tuple(f"read-{rank}-" for rank in self.stalled)
        found: list[tuple[str, Callable[[], None]]] = []
        for name in self.interleaving.ready():
            if not name.startswith(stalled) and name not in self.withheld:
                found.append((name, partial(self.interleaving.run, name)))
        wires: tuple[Wire[Any], ...] = (*self.commands, *self.entries, *self.copies)
        found += [
            (wire.name, wire.arrive)
            for wire in wires
            if len(wire) and wire.name not in self.withheld
        ]
        for number, wire in enumerate(self.reports):
            if len(wire):
                found.append((wire.name, partial(self._take_report, number)))
        for rank in self.ranks:
            for readers in rank.readers:
                if readers.checks:
                    found.append((readers.name.replace("read", "check"), readers.check))
        return found

    def run(self, seed: int, limit: int = 100_000) -> bool:
        """Let up to ``limit`` things happen in a seeded order; true if nothing more can.

        Some are favoured and some are starved for a while, so that long delays come about.

        Raises:
            BaseException: what ended a loop.
        """
        draw = Random(seed)
        speeds: dict[str, float] = {}
        for turn in range(limit):
            if turn % 40 == 0:
                speeds.clear()
            choices = self.choices()
            if not choices:
                return True
            for who, _ in choices:
                if who not in speeds:
                    speeds[who] = draw.choice((0.02, 0.3, 1.0, 4.0))
            (picked,) = draw.choices(choices, [speeds[who] for who, _ in choices])
            picked[1]()
            self._raise_errors()
        return False

    def settle(self, seed: int = 0) -> None:
        """Until nothing more can happen, with every read and message let go."""
        self.stalled.clear()
        self.withheld.clear()
        assert self.run(seed), f"no end in sight: {self.interleaving.waits()}"

    def waits(self, thread: str) -> str:
        """The wait that a thread is in."""
        return self.interleaving.waits()[thread]

    def _raise_errors(self) -> None:
        for error in self.interleaving.errors.values():
            raise error

    def close(self) -> None:
        self.groups.abort()
        self.interleaving.close()
        for rank in self.ranks:
            rank.lora.close()
