"""Builds a rank's adapter pools: what the model's stages can serve, bound to their modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.resources.lora.binding import bind, module_lora_spec
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.resources.lora.stage import PoolStage
from mstar_tp.engine.start_votes import voted
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.lora.stage_specs import ModelLoraSpecs
from mstar_tp.models.blocks import CausalLM, LoraStage
from mstar_tp.models.config.families import ModelConfig
from mstar_tp.models.registry import rules_of
from mstar_tp.wire.adapter_limits import limits_by
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

CHECKS_A_REPORT = 1000
"""Checked adapters between two lines of progress."""


def lora_spec(lora: LoraConfig, module: CausalLM, dtype: torch.dtype) -> LoraSpec:
    """The spec of the adapters that can be served on all of ``module``, which needs no weights.

    Raises:
        ConfigError: adapters cannot be served on this model, or the limits cannot hold together.
    """
    return _stage_spec(lora, LoraStage("", module, {}, None), module.config, dtype)


def lora_specs(lora: LoraConfig, module: CausalLM, dtype: torch.dtype) -> ModelLoraSpecs:
    """The specs of the adapters that can be served on each stage of ``module``.

    It needs no weights for that.

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


def build_lora(
    config: EngineConfig,
    groups: JointGroups,
    device: torch.device,
    dtype: torch.dtype,
    module: CausalLM,
    report: Callable[[CopyIn], None],
    progress: Callable[[str], None],
    context: PoolContext,
) -> LoraPools | None:
    """Build a pool for each stage and serve the configured adapters; None without adapters.

    Collective on the block.

    Raises:
        ConfigError: adapters cannot be served on this model, or the limits cannot hold together.
        AdapterError: naming every configured adapter that cannot be served.
        OtherRankFailedError: another rank's error stopped the start.
    """
    if config.lora is None:
        return None
    specs = voted(groups, lambda: lora_specs(config.lora, module, dtype))  # type: ignore[arg-type]

    def build(number: int, stage: LoraStage) -> LoraAdapterPool:
        pool_stage = PoolStage(number=number, name=stage.name, image_tokens=stage.image_tokens)
        pool = LoraAdapterPool(
            specs.stages[stage.name],
            device=device,
            groups=groups,
            dtype=dtype,
            decides=groups.tp.rank == 0,
            report=report,
            read_timeout_s=config.read_timeout_s,
            context=replace(context, stage=pool_stage, others=specs.others(stage.name)),
        )
        bind(stage.root, pool)
        return pool

    stages = module.lora_stages()
    pools = voted(groups, lambda: LoraPools([build(*stage) for stage in enumerate(stages)]))
    _serve_configured(config, config.lora, groups, pools, progress)
    return pools


def _serve_configured(
    config: EngineConfig,
    lora: LoraConfig,
    groups: JointGroups,
    pools: LoraPools,
    progress: Callable[[str], None],
) -> None:
    """Serve what the configuration names. After a restart the frontend says what is served."""
    count = len(lora.adapters)
    if count:
        progress(f"checking {count} adapter{'' if count == 1 else 's'}")
    configured = [
        (AdapterKey(name, FIRST_GENERATION), path) for name, path in lora.adapters.items()
    ]
    limits_of = limits_by(config)
    limits = {key: limits_of(key.name) for key, _ in configured}
    found = voted(groups, lambda: pools.loads.preload(configured, _checking(progress), limits))
    same = groups.same(list(found.values()))
    differing = [name for name, alike in zip(found, same, strict=True) if not alike]
    if differing:
        raise AdapterError(
            f"rank {groups.tp.rank}: other ranks' files of {', '.join(map(repr, differing))} have "
            "another rank or other targets: make the files equal on every rank"
        )


def _checking(progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Say how far the checks of many adapters are."""

    def told(done: int, total: int) -> None:
        if done % CHECKS_A_REPORT == 0 and done < total:
            progress(f"checked {done} of {total} adapters")

    return told
