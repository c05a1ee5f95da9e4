"""Builds a rank's engine from the configuration: weights, KV pages, adapter pools, graphs.

Main thread, at start. Every step that can fail on one rank alone is voted on before anybody goes
on, so a rank that cannot start never leaves the others inside a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from mstar_tp.common.errors import ConfigError
from mstar_tp.config import EngineConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.distributed.start import compute_threads, use_device
from mstar_tp.engine.base_weights import CheckpointWeights
from mstar_tp.engine.build_lora import build_lora
from mstar_tp.engine.graphs.buckets import GraphSizes
from mstar_tp.engine.graphs.device import CudaGraphs, GraphDevice
from mstar_tp.engine.graphs.forwards import CapturedForwards
from mstar_tp.engine.graphs.inputs import StepInputs
from mstar_tp.engine.graphs.warm_up import capture_all
from mstar_tp.engine.kv_sizes import KvSizes, agreed_kv_sizes
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.base import Resource
from mstar_tp.engine.resources.kv.host_copies import HostCopies
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.kv.prefix import PrefixNames
from mstar_tp.engine.resources.lora.binding import check_bound
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.cpu_cache.reads import Readers
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.start_votes import check_equal, voted
from mstar_tp.layers.attention.attention import AttentionPlanner, AttentionRow, KVCache
from mstar_tp.layers.attention.backend import attention_planner
from mstar_tp.lora.device.device_copies import queues_of
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import ModelConfig, load_model_config
from mstar_tp.models.cpp_decode import CppDecoder
from mstar_tp.models.fingerprint import model_fingerprint
from mstar_tp.models.loader import load_model, resolve_dtype
from mstar_tp.models.registry import rules_of
from mstar_tp.recording import NO_RECORDING, Recorder
from mstar_tp.wire.reports import CopyIn

WARM_UP_TOKENS = 64
ONE_THREAD_BYTES = 64 << 20
"""A rank with fewer bytes of weights than this computes on one thread."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """The tables and the model of one rank, before any loop runs."""

    model: ServedModel
    model_config: ModelConfig
    requests: RequestTable
    kv: KvPool
    lora: LoraPools | None
    max_model_len: int
    inputs: StepInputs
    graphs: CapturedForwards | None = None
    """None: every step runs eagerly."""

    @property
    def resources(self) -> tuple[Resource, ...]:
        """Everything that a step is admitted to, in that order."""
        return (self.kv,) if self.lora is None else (*self.lora.pools, self.kv)

    def close(self) -> None:
        """Let go of what outlives the last step.

        NCCL leaves a group only once no captured graph holds its collectives, and threads that
        watch the rank may hold whoever replayed them.
        """
        if self.graphs is not None:
            self.graphs.close()
        if self.lora is not None:
            self.lora.close()


def build_engine(
    config: EngineConfig,
    groups: JointGroups,
    device: torch.device,
    report: Callable[[CopyIn], None],
    progress: Callable[[str], None],
    recorder: Recorder = NO_RECORDING,
    wrap_readers: Callable[[Readers], Readers] = lambda readers: readers,
    at_warm_up: Callable[[], None] = lambda: None,
    captures: GraphDevice | None = None,
) -> Engine:
    """Load everything a rank serves with. Collective on the whole block.

    ``at_warm_up`` is called as the first forward is about to run. ``captures`` is what a test has
    in place of the device's own graphs; None for those, if it has any.

    Raises:
        MstarError: the model, an adapter or an option is at fault; the message says which.
        OtherRankFailedError: another rank's error stopped the start.
    """
    use_device(device)
    model_config = voted(groups, lambda: load_model_config(config.model))
    dtype = resolve_dtype(config.dtype, model_config)
    threads = _use_threads(config, model_config, dtype, groups.tp.world_size)
    module = _load(config, groups, model_config, dtype, device, progress)
    kv_sizes = agreed_kv_sizes(config, groups, model_config, module)
    caches, offload = _allocate(config, groups, kv_sizes, model_config, module, device)
    # Off CUDA, graphs come with the operators that CUDA has kernels for.
    on_operators = captures is not None and device.type != "cuda"
    planner = _attention(config, groups, module, device, on_operators=on_operators)
    requests = RequestTable(kv_sizes.max_model_len)
    context = PoolContext(
        recorder=recorder,
        wrap_readers=wrap_readers,
        base=CheckpointWeights(config.model, rules_of(model_config.architecture).own),
        invariant=config.batch_invariant,
        backend="ops" if on_operators else "auto",
        roots=() if config.lora is None else config.lora.real_roots(),
    )
    lora = build_lora(config, groups, device, dtype, module, report, progress, context)
    page_size, max_model_len = config.block_size, kv_sizes.max_model_len
    cpp = None if on_operators else _cpp_decoder(module, caches, page_size, max_model_len, lora)
    names = _page_names(config, groups, str(dtype), requests, lora, recorder)
    most_tokens = config.step_tokens(device.type)
    sizes = GraphSizes.of(config.max_num_seqs, most_tokens, config.graph_rows, config.graph_tokens)
    table = PageTable(kv_sizes.num_pages, page_size)
    engine = Engine(
        model=ServedModel(
            module, caches, planner, device, threads, compute_threads(config.threads), cpp
        ),
        model_config=model_config,
        requests=requests,
        kv=KvPool(table, lambda rid: requests[rid].expected, offload, names),
        lora=lora,
        max_model_len=max_model_len,
        inputs=_inputs(config, sizes, device),
    )
    _start_forwards(engine, config, groups, sizes, captures, progress, at_warm_up)
    return engine


def _inputs(config: EngineConfig, sizes: GraphSizes, device: torch.device) -> StepInputs:
    """Allocate the inputs of the largest step or bucket, which may be the larger one."""
    most_tokens = max(config.step_tokens(device.type), *sizes.rows, *sizes.tokens)
    return StepInputs(most_tokens, config.max_num_seqs, device)


def _start_forwards(
    engine: Engine,
    config: EngineConfig,
    groups: JointGroups,
    sizes: GraphSizes,
    captures: GraphDevice | None,
    progress: Callable[[str], None],
    at_warm_up: Callable[[], None],
) -> None:
    """Run the first forward, and capture graphs where the device has any. Collective."""
    progress("warming up")
    at_warm_up()
    device = engine.model.module.place.device
    most_tokens = min(engine.max_model_len, config.step_tokens(device.type))
    _warm_up(engine, min(WARM_UP_TOKENS, most_tokens))
    if captures is None and device.type == "cuda":
        captures = CudaGraphs(device)
    if captures is not None and not config.enforce_eager:
        progress("capturing graphs")
        engine.graphs = _capture(engine, sizes, groups, captures)
        _validate(engine)


def _load(
    config: EngineConfig,
    groups: JointGroups,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> CausalLM:
    """Load this rank's shard of the base model. Collective."""
    progress(f"loading {config.model} as {str(dtype).removeprefix('torch.')}")
    return voted(
        groups,
        lambda: load_model(
            config.model,
            model_config,
            groups.tp,
            dtype,
            device,
            _loading(progress),
            max_position=config.max_model_len,
        ),
    )


def _allocate(
    config: EngineConfig,
    groups: JointGroups,
    sizes: KvSizes,
    model: ModelConfig,
    module: CausalLM,
    device: torch.device,
) -> tuple[list[KVCache], KvOffload | None]:
    """Allocate the KV pages of every layer, on the device and in host memory. Collective."""
    heads, dtype = module.num_kv_heads, module.place.dtype
    caches = [
        KVCache.allocate(sizes.num_pages, config.block_size, heads, model.head_dim, dtype, device)
        for _ in range(model.num_layers)
    ]
    return caches, voted(groups, lambda: _offload(caches, sizes.num_host_pages, device))


def _attention(
    config: EngineConfig,
    groups: JointGroups,
    module: CausalLM,
    device: torch.device,
    *,
    on_operators: bool,
) -> AttentionPlanner:
    """Choose what runs attention. Collective."""
    return voted(
        groups,
        lambda: attention_planner(
            "operators" if on_operators else config.attention_backend,
            module,
            module.place.dtype,
            config.block_size,
            device,
            invariant=config.batch_invariant,
        ),
    )


def _offload(kv: list[KVCache], num_pages: int, device: torch.device) -> KvOffload | None:
    """Allocate the KV pages in host memory; None for no pages.

    Raises:
        ConfigError: the system has not as much memory to give.
    """
    if not num_pages:
        return None
    try:
        copies = HostCopies(kv, num_pages, queues_of(device))
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{num_pages} KV pages in host memory cannot be had ({error}): lower "
            "--kv-offloading-size"
        ) from None
    return KvOffload(HostPages(num_pages), copies)


def _page_names(
    config: EngineConfig,
    groups: JointGroups,
    dtype: str,
    requests: RequestTable,
    lora: LoraPools | None,
    recorder: Recorder,
) -> PrefixNames | None:
    """Make the names that requests share pages by; None where they share none. Collective."""
    if not config.prefix_caching:
        return None
    model = voted(groups, lambda: model_fingerprint(config.model, dtype))
    check_equal(groups, {"the model's fingerprint": int(model, 16) & (1 << 62) - 1})
    fingerprint_of = (lambda key: None) if lora is None else lora.fingerprint
    return PrefixNames(requests, config.block_size, model, fingerprint_of, recorder)


def _cpp_decoder(
    module: CausalLM,
    kv: list[KVCache],
    page_size: int,
    max_model_len: int,
    lora: LoraPools | None,
) -> CppDecoder | None:
    """The decoder in C++ that runs decoding steps; None where it cannot be had."""
    if lora is not None and len(lora.pools) > 1:
        return None
    deltas = None if lora is None else lora.pools[0].deltas.current_plan
    return CppDecoder.of(module, kv, page_size, -(-max_model_len // page_size), deltas)


def _capture(
    engine: Engine, sizes: GraphSizes, groups: JointGroups, captures: GraphDevice
) -> CapturedForwards | None:
    """Capture a graph for each of ``sizes``; None when some rank can capture none. Collective."""
    forwards = voted(
        groups,
        lambda: CapturedForwards(
            engine.model,
            engine.lora,
            captures,
            sizes,
            engine.inputs,
            engine.max_model_len,
        ),
    )
    return forwards if capture_all(forwards, groups, engine.kv.table.num_pages) else None


def _use_threads(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, world_size: int
) -> int:
    """Set torch's compute threads: as configured, else 1 or a share of the cores; return how many.

    One thread serves a small model, whose products are too short to share out: a second
    costs more in waiting than it brings, and takes a core from the frontend (measured:
    docs/decisions.md). Its steps of long prompts take all of the share.
    """
    threads = config.threads
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    rows = model.vocab_size + model.num_layers * heads + 3 * model.inner_sizes
    weights = model.hidden_size * rows
    if threads is None:
        small = weights * dtype.itemsize // world_size < ONE_THREAD_BYTES
        threads = 1 if small else compute_threads(None)
    torch.set_num_threads(threads)
    return threads


def _warm_up(engine: Engine, num_tokens: int) -> None:
    """Run one base forward outside any step, so no request pays for set-up. Collective."""
    model, kv = engine.model, engine.kv
    pages = range(kv.table.pages_for(num_tokens))
    with engine.lora.base_only() if engine.lora is not None else nullcontext():
        context = model.plan([AttentionRow(num_tokens, 0, pages)])
        hidden = model.forward([0] * num_tokens, range(num_tokens), context)
        model.logits(hidden, [num_tokens - 1])
        if engine.model_config.vision is not None:
            model.encode([bytes(engine.model_config.vision.pixels.num_bytes)])
    if engine.lora is not None:
        for stage, pool in zip(model.module.lora_stages(), engine.lora.pools, strict=True):
            check_bound(stage.root, pool)
    _validate(engine)


def _validate(engine: Engine) -> None:
    """Check that warming up or capturing left nothing in the tables.

    Raises:
        LockstepError: naming what is left.
    """
    for resource in engine.resources:
        resource.post_warmup_validate()


def _loading(progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Say how far loading is, at every quarter."""

    def told(done: int, total: int) -> None:
        if done * 4 // total != (done - 1) * 4 // total:
            progress(f"loaded {done} of {total} modules")

    return told
