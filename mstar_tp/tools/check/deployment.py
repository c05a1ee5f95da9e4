"""Validation of a whole deployment before any rank starts.

Every block is checked by itself, by the functions that the ranks and the frontend start with. Needs
torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec
import zmq

from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError, MstarError, RequestError
from mstar_tp.config import ConfigFindings, ServeConfig
from mstar_tp.distributed.start import check_gpu
from mstar_tp.engine.kv_sizes import check_length, kv_lengths, kv_page_bytes, num_host_pages
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.access import KeyRing, key_ring
from mstar_tp.frontend.api.http_server import open_listener
from mstar_tp.frontend.text.adapter_tokenizers import AdapterTokenizers
from mstar_tp.frontend.text.tokenizer import load_tokenizer
from mstar_tp.layers.attention.attention import KVCache
from mstar_tp.recording import FileRecorder, recording_path
from mstar_tp.tools.check.adapters import FileValidator, Validator, inspect_adapters
from mstar_tp.tools.check.base_model import ModelValidator, PlannedModel, plan_model, validator_of
from mstar_tp.tools.check.findings import (
    BLOCKS,
    AdapterFindings,
    Block,
    CheckReport,
    Finding,
    MemoryFindings,
)
from mstar_tp.tools.check.host_memory import MemoryInfo, gpu_memory_info, host_memory_info
from mstar_tp.tools.check.render import size
from mstar_tp.tools.check.sizes import META, held_bytes, slot_bytes
from mstar_tp.wire.address import Bind
from mstar_tp.wire.curve import curve_from_secret
from mstar_tp.worker.start_up import device_name

Told = Callable[[int], AbstractContextManager[Callable[[int, int], None]]]


_SIZES = frozenset(
    f"engine.{key}"
    for key in (
        "tensor_parallel_size",
        "dtype",
        "device",
        "max_model_len",
        "max_num_seqs",
        "block_size",
        "kv_cache_memory_bytes",
        "num_kv_pages",
        "kv_offloading_size",
        "lora.max_loras",
        "lora.max_lora_rank",
        "lora.max_cpu_loras",
        "lora.max_cpu_lora_bytes",
    )
)
"""Without the values that these were given, nobody can say what fits."""


def check_deployment(
    found: ConfigFindings, source: str, *, digests: bool, progress: Told
) -> CheckReport:
    """Everything that is wrong with it. ``progress(number of adapters)`` is told of each."""
    check = _Check(digests, progress)
    for text in found.problems:
        check.problem("config", text)
    check.environment()
    if found.config is not None:
        check.server(found.config, found.faulty)
        check.deployment(found.config, found.faulty)
    return check.report(source)


class _Check:
    """The findings so far."""

    def __init__(self, digests: bool, progress: Told) -> None:
        self._digests = digests
        self._progress = progress
        self._problems: list[Finding] = []
        self._notes: list[Finding] = []
        self._model: PlannedModel | None = None
        self._path = ""
        self._memory: MemoryFindings | None = None
        self._adapters: list[AdapterFindings] = []
        self._seconds = 0.0

    def problem(self, block: Block, text: str, adapter: str | None = None) -> None:
        self._problems += [
            Finding(block=block, text=line, adapter=adapter) for line in text.splitlines()
        ]

    def note(self, block: Block, text: str, adapter: str | None = None) -> None:
        self._notes.append(Finding(block=block, text=text, adapter=adapter))

    @contextlib.contextmanager
    def part(self, block: Block) -> Iterator[None]:
        """Run a part whose failure is one problem, and hides no other's."""
        try:
            yield
        except MstarError as error:
            self.problem(block, str(error))
        except Exception as error:
            self.problem(block, f"{block}: cannot be checked: {type(error).__name__}: {error}")

    def report(self, source: str) -> CheckReport:
        def order(finding: Finding) -> int:
            return BLOCKS.index(finding.block)

        return CheckReport(
            ok=not self._problems,
            source=source,
            problems=tuple(sorted(self._problems, key=order)),
            notes=tuple(sorted(self._notes, key=order)),
            model=None if self._model is None else self._model.findings(self._path),
            memory=self._memory,
            adapters=tuple(self._adapters),
            seconds=round(self._seconds, 3),
        )

    # ------------------------------------------------------------------ processes

    def environment(self) -> None:
        """Variables that every process reads, and the private sockets it opens."""
        switches = (env.wants_cpu_kernels, env.wants_shared_memory)
        for read in (env.log_level, env.faults_file, *switches):
            with self.part("environment"):
                read()
        with self.part("environment"):
            key = env.secret()
            if key is not None:
                curve_from_secret(key)
        with self.part("environment"):
            _try_private_socket()

    def server(self, config: ServeConfig, faulty: frozenset[str]) -> None:
        """The API's address, who may load adapters and from where, and the recordings."""
        server, engine = config.server, config.engine
        if not faulty & {"server.host", "server.port"}:
            with self.part("server"):
                open_listener(server.host, server.port).close()
        keys = KeyRing(())
        with self.part("server"):
            keys = key_ring(server)
        if not keys.guarded and not _is_loopback(server.host):
            self.note(
                "server", f"anybody who reaches {server.host} is served: --api-key asks for a key"
            )
        roots = () if engine.lora is None else engine.lora.all_roots
        if roots and not keys.operators_guarded:
            who = "everybody with an API key" if keys.guarded else "every client"
            self.note("server", f"{who} may load and unload adapters: --admin-key asks for a key")
        with self.part("server"):
            base = ServedModels(config.base_names, engine.model, {})
            on_demand = engine.lora is not None and engine.lora.on_demand
            StateFile(server.state_file).restore(base, AdapterRoots(roots), on_demand=on_demand)
        for root in roots:
            if not os.path.isdir(root):
                self.note("server", f"{root}: no such folder: nothing is loaded of it")
        for rank in range(engine.tensor_parallel_size if engine.record else 0):
            with self.part("server"):
                assert engine.record is not None
                recorder = FileRecorder(recording_path(engine.record, rank, 0))
                recorder.close()
                recorder.path.unlink()

    # ------------------------------------------------------------------ ranks

    def deployment(self, config: ServeConfig, faulty: frozenset[str]) -> None:
        """The model, its adapters, and whether all of it fits."""
        engine = config.engine
        device: str | None = None
        with self.part("model"):
            device = device_name(engine.device)
            if device == "cuda":
                check_gpu(engine.tensor_parallel_size - 1)
        if engine.model and not os.path.isdir(engine.model):
            self.problem("model", f"engine.model: {engine.model}: no such folder")
        elif engine.model:
            self._path = engine.model
            with self.part("model"):
                load_tokenizer(engine.model)
            with self.part("model"):
                self._model = plan_model(engine)
            for text in () if self._model is None else self._model.problems:
                self.problem("model", text)
        self._check_adapters(config)
        if self._model is None:
            return
        with self.part("memory"):
            if self._model.ranks and not faulty & _SIZES:
                self._check_memory(config, self._model, device)
            else:
                check_length(engine, self._model.config)

    def _check_adapters(self, config: ServeConfig) -> None:
        lora = config.engine.lora
        if lora is None:
            return
        validator: Validator = FileValidator(
            max_rank=lora.max_lora_rank, max_saved_rows=lora.max_lora_saved_rows
        )
        if self._model is not None:
            with self.part("adapters"):
                validator = validator_of(self._model, config.engine.model, lora)
        adapters = list(lora.adapters.items())
        start = time.perf_counter()
        with self.part("adapters"), self._progress(len(adapters)) as told:
            self._adapters = inspect_adapters(
                validator, adapters, digests=self._digests, progress=told
            )
        with self.part("adapters"):
            self._check_texts(engine_model=config.engine.model)
        self._seconds = time.perf_counter() - start
        for findings in self._adapters:
            for text in findings.refusals:
                self.problem("adapters", text, findings.name)
            for text in findings.notes:
                self.note("adapters", f"adapter {findings.name!r}: {text}", findings.name)
        if isinstance(validator, ModelValidator):
            with self.part("adapters"):
                validator.check_slots()

    def _check_texts(self, engine_model: str) -> None:
        """The tokenizers and chat templates that adapters ship, as the start validates them."""
        try:
            own = AdapterTokenizers(load_tokenizer(engine_model), engine_model)
        except MstarError:
            return  # told of the model
        for at, findings in enumerate(self._adapters):
            try:
                own.read(findings.name, findings.path, configured=True)
            except RequestError as error:
                refusals = (*findings.refusals, str(error))
                self._adapters[at] = msgspec.structs.replace(findings, refusals=refusals)

    def _check_memory(self, config: ServeConfig, model: PlannedModel, device: str | None) -> None:
        engine, dtype, world_size = config.engine, model.dtype, model.world_size
        lengths = [kv_lengths(engine, model.config, rank) for rank in model.ranks]
        max_model_len, pages = lengths[0]
        if max_model_len < (engine.max_model_len or model.config.max_position):
            self.note("memory", f"max_model_len is {max_model_len}: all that the KV pages hold")
        kv = [
            [
                KVCache.allocate(
                    pages,
                    engine.block_size,
                    rank.num_kv_heads,
                    model.config.head_dim,
                    dtype,
                    META,
                )
                for _ in range(model.config.num_layers)
            ]
            for rank in model.ranks
        ]
        slots = host = (0,) * world_size
        if engine.lora is not None:
            specs = model.specs(engine.lora).stages.values()
            slots = tuple(
                sum(slot_bytes(spec, rank, world_size, dtype) for spec in specs)
                for rank in range(world_size)
            )
            host = self._cpu_cache(config, slots, len(specs))
        on_gpu = device == "cuda" or (device is None and engine.device == "cuda")
        gpu = gpu_memory_info(world_size) if device == "cuda" else MemoryInfo(None, None)
        ram = host_memory_info()
        memory = self._memory = MemoryFindings(
            device="cuda" if on_gpu else "cpu",
            weight_bytes=model.weight_bytes(on_cpu=not on_gpu),
            kv_bytes=tuple(held_bytes(caches) for caches in kv),
            slot_bytes=slots,
            cpu_cache_bytes=host,
            kv_host_bytes=tuple(
                num_host_pages(engine, model.config, rank, max_model_len, pages)
                * kv_page_bytes(engine, model.config, rank)
                for rank in model.ranks
            ),
            num_kv_pages=pages,
            max_model_len=max_model_len,
            device_total=gpu.total,
            device_free=gpu.free,
            host_total=ram.total,
            host_free=ram.free,
        )
        self._fit(memory)

    def _cpu_cache(
        self, config: ServeConfig, slots: Sequence[int], num_stages: int
    ) -> tuple[int, ...]:
        """The most that each rank's CPU caches, one a stage of the model, can hold."""
        lora = config.engine.lora
        assert lora is not None
        if lora.max_cpu_lora_bytes is not None:
            return (num_stages * lora.max_cpu_lora_bytes,) * len(slots)
        capacity, found = lora.host_capacity, []
        held = capacity if lora.all_roots else min(capacity, len(lora.adapters))
        copies = [
            findings.host_bytes for findings in self._adapters if findings.host_bytes is not None
        ]
        for rank, all_slots in enumerate(slots):
            mine = sorted((copy[rank] for copy in copies), reverse=True)[:held]
            # One that is not known yet is as large as the largest known, or as a whole slot.
            each = mine[0] if mine else all_slots // lora.max_loras
            found.append(sum(mine) + each * (held - len(mine)))
        return tuple(found)

    def _fit(self, memory: MemoryFindings) -> None:
        on_device = [
            sum(parts)
            for parts in zip(memory.weight_bytes, memory.kv_bytes, memory.slot_bytes, strict=True)
        ]
        host = sum(memory.cpu_cache_bytes) + sum(memory.kv_host_bytes)
        if memory.device == "cuda":
            self._compare("a GPU", max(on_device), memory.device_total, memory.device_free)
        else:
            host += sum(on_device)
        self._compare("RAM", host, memory.host_total, memory.host_free)

    def _compare(self, where: str, wanted: int, total: int | None, free: int | None) -> None:
        what = "a rank needs" if where == "a GPU" else "the ranks together need"
        if total is not None and wanted > total:
            self.problem(
                "memory",
                f"{what} {size(wanted)} of {where}, which has {size(total)}: lower "
                "--kv-cache-memory-bytes, --kv-offloading-size, --max-loras or --max-cpu-loras, or "
                "use more ranks or machines",
            )
        elif free is not None and wanted > free:
            self.note("memory", f"{what} {size(wanted)} of {where}: {size(free)} is free now")


def _try_private_socket() -> None:
    """Raises MstarError: temporary folders cannot hold a process's sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bind = Bind("ipc", option="TMPDIR")
    try:
        with context.socket(zmq.PULL) as socket:
            bind.open(socket)
    except OSError as error:
        raise ConfigError(f"TMPDIR: no socket can be made there: {error}") from None
    finally:
        bind.close()
        context.term()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
