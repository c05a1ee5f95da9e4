"""Putting a rank's engine together from the configuration: weights, KV pages, adapter pool.

Main thread, at start. Every step that can fail on one rank alone is voted on before anybody goes
on, so a rank that cannot
start never leaves the others inside a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mstar_tp.common.errors import AdapterError, ConfigError, LockstepError, MstarError
from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.distributed.start import compute_threads, use_device
from mstar_tp.engine.base_weights import CheckpointWeights
from mstar_tp.engine.graphs.buckets import GraphSizes
from mstar_tp.engine.graphs.device import CudaGraphs, GraphDevice
from mstar_tp.engine.graphs.forwards import CapturedForwards
from mstar_tp.engine.graphs.inputs import StepInputs
from mstar_tp.engine.graphs.warm_up import capture_all
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.kv.host_copies import HostCopies
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.kv.prefix import PrefixNames
from mstar_tp.engine.resources.lora.binding import bind, check_bound, module_lora_spec
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.cpu_cache.reads import Readers
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.resources.lora.stage import PoolStage
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.layers.attention.attention import AttentionRow, KVCache
from mstar_tp.layers.attention.backend import attention_planner
from mstar_tp.lora.device.device_copies import queues_of
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.lora.stage_specs import ModelLoraSpecs
from mstar_tp.models.blocks import CausalLM, LoraStage
from mstar_tp.models.config.families import ModelConfig, load_model_config
from mstar_tp.models.cpp_decode import CppDecoder
from mstar_tp.models.fingerprint import model_fingerprint
from mstar_tp.models.loader import load_model, resolve_dtype
from mstar_tp.models.registry import rules_of
from mstar_tp.recording import NO_RECORDING, Recorder
from mstar_tp.wire.adapter_limits import limits_by
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_HOST_BYTES = 4 << 30
WARM_UP_TOKENS = 64
ONE_THREAD_BYTES = 64 << 20
"""A rank with fewer bytes of weights than this computes on one thread."""
CHECKS_A_REPORT = 1000


class OtherRankFailedError(MstarError):
    """Some other rank could not start; it says why itself."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One rank's tables and model, before any loop runs."""

    model: ServedModel
    model_config: ModelConfig
    requests: RequestTable
    kv: KvPool
    lora: LoraPools | None
    max_model_len: int
    inputs: StepInputs
    graphs: CapturedForwards | None = None
    """None: every step runs eagerly."""

    def close(self) -> None:
        """Let go of what outlives the last step.

        NCCL leaves a group only once no captured graph holds its collectives, and threads that
        watch the rank may hold whoever replayed them.
        """
        if self.graphs is not None:
            self.graphs.close()
        if self.lora is not None:
            self.lora.close()


def voted(groups: JointGroups, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and go on only when all succeeded. Collective.

    Raises:
        BaseException: what this rank's own work raised.
        OtherRankFailedError: this rank succeeded and another did not.
    """
    error: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as failure:
        error = failure
    (everyone,) = groups.agree([0 if error is not None else 1])
    if error is not None:
        raise error
    if not everyone:
        raise OtherRankFailedError("another rank could not start")
    return value  # type: ignore[return-value]  # T may include None


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

    ``at_warm_up`` is called as the first forward is about to run. ``captures``: None for the
    device's own graphs, if it has any; else what a test has in their place.

    Raises:
        MstarError: the model, an adapter or an option is at fault; the message says which.
        OtherRankFailedError: another rank's error stopped the start.
    """
    use_device(device)
    model_config = voted(groups, lambda: load_model_config(config.model))
    dtype = resolve_dtype(config.dtype, model_config)
    threads = _threads(config, model_config, dtype, groups.tp.world_size)
    torch.set_num_threads(threads)
    progress(f"loading {config.model} as {str(dtype).removeprefix('torch.')}")
    module = voted(
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
    max_model_len, pages = voted(groups, lambda: kv_lengths(config, model_config, module))
    if max_model_len < (config.max_model_len or model_config.max_position):
        logger.warning("max_model_len is %d tokens: all that the KV pages hold", max_model_len)
    host_pages = num_host_pages(config, model_config, module, max_model_len, pages)
    _check_equal(
        groups,
        {"max_model_len": max_model_len, "KV pages": pages, "host KV pages": host_pages},
    )
    kv = [
        KVCache.allocate(
            pages, config.block_size, module.num_kv_heads, model_config.head_dim, dtype, device
        )
        for _ in range(model_config.num_layers)
    ]
    offload = None
    if host_pages:
        offload = voted(groups, lambda: _offload(kv, host_pages, device))
    # Off CUDA, graphs come with the operators that CUDA has kernels for.
    on_operators = captures is not None and device.type != "cuda"
    planner = voted(
        groups,
        lambda: attention_planner(
            "operators" if on_operators else config.attention_backend,
            module,
            dtype,
            config.block_size,
            device,
            invariant=config.batch_invariant,
        ),
    )
    requests = RequestTable(max_model_len)
    base = CheckpointWeights(config.model, rules_of(model_config.architecture).own)
    context = PoolContext(
        recorder=recorder,
        wrap_readers=wrap_readers,
        base=base,
        invariant=config.batch_invariant,
        backend="ops" if on_operators else "auto",
        roots=() if config.lora is None else config.lora.real_roots(),
    )
    lora = _build_lora(config, groups, device, dtype, module, report, progress, context)
    native = None
    if not on_operators:
        native = _native(module, kv, config.block_size, max_model_len, lora)
    names = _page_names(config, groups, str(dtype), requests, lora, recorder)
    step_tokens = config.step_tokens(device.type)
    sizes = GraphSizes.of(config.max_num_seqs, step_tokens, config.graph_rows, config.graph_tokens)
    engine = Engine(
        model=ServedModel(
            module, kv, planner, device, threads, compute_threads(config.threads), native
        ),
        model_config=model_config,
        requests=requests,
        kv=KvPool(
            PageTable(pages, config.block_size),
            lambda rid: requests[rid].expected,
            offload,
            names,
        ),
        lora=lora,
        max_model_len=max_model_len,
        # A bucket may be larger than the largest step.
        inputs=StepInputs(
            max(step_tokens, *sizes.rows, *sizes.tokens),
            config.max_num_seqs,
            device,
        ),
    )
    progress("warming up")
    at_warm_up()
    _warm_up(engine, min(WARM_UP_TOKENS, max_model_len, step_tokens))
    if captures is None and device.type == "cuda":
        captures = CudaGraphs(device)
    if captures is not None and not config.enforce_eager:
        progress("capturing graphs")
        engine.graphs = _capture(engine, sizes, groups, captures)
        _validate(engine)
    return engine


def _offload(kv: list[KVCache], num_pages: int, device: torch.device) -> KvOffload:
    """Raises ConfigError: the system has not as much memory to give."""
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
    """Collective."""
    if not config.prefix_caching:
        return None
    model = voted(groups, lambda: model_fingerprint(config.model, dtype))
    _check_equal(groups, {"the model's fingerprint": int(model, 16) & (1 << 62) - 1})
    fingerprint_of = (lambda key: None) if lora is None else lora.fingerprint
    return PrefixNames(requests, config.block_size, model, fingerprint_of, recorder)


def _native(
    module: CausalLM,
    kv: list[KVCache],
    page_size: int,
    max_model_len: int,
    lora: LoraPools | None,
) -> CppDecoder | None:
    """Return what runs decoding steps, where it can be had."""
    if lora is not None and len(lora.pools) > 1:
        return None
    deltas = None if lora is None else lora.pools[0].current_plan
    return CppDecoder.of(module, kv, page_size, -(-max_model_len // page_size), deltas)


def _capture(
    engine: Engine, sizes: GraphSizes, groups: JointGroups, captures: GraphDevice
) -> CapturedForwards | None:
    """Collective."""
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


def _threads(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, world_size: int) -> int:
    """Compute threads: as configured, else one for a small model, else a share of the cores.

    A small model's products are too short to share out: a second thread costs more in waiting
    than it brings, and takes a core from the frontend (measured: docs/decisions.md). Its steps of
    long prompts take all of the share.
    """
    if config.threads is not None:
        return config.threads
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    rows = model.vocab_size + model.num_layers * heads + 3 * model.inner_sizes
    weights = model.hidden_size * rows
    if weights * dtype.itemsize // world_size < ONE_THREAD_BYTES:
        return 1
    return compute_threads(None)


def _warm_up(engine: Engine, num_tokens: int) -> None:
    """One base forward outside any step: no request pays for first-use set-up. Collective."""
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
    """Raises LockstepError: warming up or capturing left something in the tables."""
    engine.kv.post_warmup_validate()
    if engine.lora is not None:
        engine.lora.post_warmup_validate()


def _loading(progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Say how far loading is, at every quarter."""

    def told(done: int, total: int) -> None:
        if done * 4 // total != (done - 1) * 4 // total:
            progress(f"loaded {done} of {total} modules")

    return told


def check_length(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError: requests are to be longer than the model goes."""
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_position:
        raise ConfigError(
            f"--max-model-len is {wanted} and the model's own limit is {model.max_position} tokens"
        )


def kv_lengths(config: EngineConfig, model: ModelConfig, module: CausalLM) -> tuple[int, int]:
    """The longest request and the number of KV pages, which must be able to hold one such request.

    Raises:
        ConfigError: naming the option that asks for more than the model or the memory has.
    """
    check_length(config, model)
    wanted = config.max_model_len
    length = wanted or model.max_position
    page = config.block_size
    page_bytes = kv_page_bytes(config, model, module)
    full_length_pages = -(-length // page)
    if config.num_kv_pages is not None:
        pages = config.num_kv_pages
    else:
        budget = config.kv_cache_memory_bytes or DEFAULT_KV_BYTES
        pages = min(budget // page_bytes, config.max_num_seqs * full_length_pages)
    if full_length_pages > pages:
        if wanted is not None or pages == 0:
            raise ConfigError(
                f"a request of {length} tokens needs {full_length_pages} KV pages of {page} tokens "
                f"and there are {pages}: raise --kv-cache-memory-bytes to "
                f"{full_length_pages * page_bytes} or lower "
                f"--max-model-len to {pages * page}"
            )
        length = pages * page
    return length, pages


def kv_page_bytes(config: EngineConfig, model: ModelConfig, module: CausalLM) -> int:
    """Bytes of one KV page on this rank, all layers."""
    heads = 2 * model.num_layers * module.num_kv_heads
    return heads * config.block_size * model.head_dim * module.place.dtype.itemsize


def num_host_pages(
    config: EngineConfig, model: ModelConfig, module: CausalLM, max_model_len: int, num_pages: int
) -> int:
    """How many KV pages of preempted requests a rank's host memory holds, beside ``num_pages`` on
    the device.
    """
    page_bytes = kv_page_bytes(config, model, module)
    if config.kv_offloading_size is not None:
        total = int(config.kv_offloading_size * (1 << 30))
        return total // config.tensor_parallel_size // page_bytes
    if num_pages >= config.max_num_seqs * -(-max_model_len // config.block_size):
        return 0  # nobody is ever preempted
    return min(num_pages, DEFAULT_KV_HOST_BYTES // page_bytes)


def _check_equal(groups: JointGroups, values: dict[str, int]) -> None:
    for name, same in zip(values, groups.same(list(values.values())), strict=True):
        if not same:
            raise LockstepError(
                f"rank {groups.tp.rank}: {name} is {values[name]} here and differs on another rank"
            )


def lora_spec(lora: LoraConfig, module: CausalLM, dtype: torch.dtype) -> LoraSpec:
    """Return what can be served on all of ``module``, which needs no weights for it.

    Raises:
        ConfigError: adapters cannot be served on this model, or the limits cannot hold together.
    """
    return _stage_spec(lora, LoraStage("", module, {}, None), module.config, dtype)


def lora_specs(lora: LoraConfig, module: CausalLM, dtype: torch.dtype) -> ModelLoraSpecs:
    """Return what can be served on each node of ``module``, which needs no weights for it.

    Raises:
        ConfigError: adapters cannot be served on this model, or the limits cannot hold together.
    """
    return ModelLoraSpecs(
        {
            stage.name: _stage_spec(lora, stage, module.config, dtype)
            for stage in module.lora_stages()
        }
    )


def _stage_spec(
    lora: LoraConfig, stage: LoraStage, config: ModelConfig, dtype: torch.dtype
) -> LoraSpec:
    unit = "adapters" if lora.max_cpu_lora_bytes is None else "bytes"
    return module_lora_spec(
        stage.root,
        rules_of(config.architecture),
        rows=stage.rows,
        slots=lora.max_loras,
        max_rank=lora.max_lora_rank,
        cpu_capacity=lora.host_capacity,
        dtype=str(dtype).removeprefix("torch."),
        exclude=lora.exclude,
    ).apply_yaml_overrides(
        {
            "cpu_unit": unit,
            "adapters": tuple(lora.adapters.items()),
            "max_saved_rows": lora.max_lora_saved_rows,
        }
    )


def _build_lora(
    config: EngineConfig,
    groups: JointGroups,
    device: torch.device,
    dtype: torch.dtype,
    module: CausalLM,
    report: Callable[[CopyIn], None],
    progress: Callable[[str], None],
    context: PoolContext,
) -> LoraPools | None:
    if config.lora is None:
        return None
    lora, stages = config.lora, module.lora_stages()

    def build() -> LoraPools:
        specs = lora_specs(lora, module, dtype)
        pools = []
        for number, stage in enumerate(stages):
            mine = PoolStage(number=number, name=stage.name, image_tokens=stage.image_tokens)
            pool = LoraAdapterPool(
                specs.stages[stage.name],
                device=device,
                groups=groups,
                dtype=dtype,
                decides=groups.tp.rank == 0,
                report=report,
                read_timeout_s=config.read_timeout_s,
                context=replace(context, stage=mine, others=specs.others(stage.name)),
            )
            bind(stage.root, pool)
            pools.append(pool)
        return LoraPools(pools)

    lora_pools = voted(groups, build)
    count = len(lora.adapters)
    if count:  # after a restart the frontend tells what is served
        progress(f"checking {count} adapter{'' if count == 1 else 's'}")
    configured = [
        (AdapterKey(name, FIRST_GENERATION), path) for name, path in lora.adapters.items()
    ]
    limits_of = limits_by(config)
    limits = {key: limits_of(key.name) for key, _ in configured}
    found = voted(groups, lambda: lora_pools.preload(configured, _checking(progress), limits))
    same = groups.same(list(found.values()))
    differing = [name for name, alike in zip(found, same, strict=True) if not alike]
    if differing:
        raise AdapterError(
            f"rank {groups.tp.rank}: other ranks' files of {', '.join(map(repr, differing))} have "
            "another rank or other targets: make the files equal on every rank"
        )
    return lora_pools


def _checking(progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Say how far the checks of many adapters are."""

    def told(done: int, total: int) -> None:
        if done % CHECKS_A_REPORT == 0 and done < total:
            progress(f"checked {done} of {total} adapters")

    return told
