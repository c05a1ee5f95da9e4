"""The model as a built rank describes it, to the frontend and in its recording."""

from __future__ import annotations

from mstar_tp.common.version import VERSION
from mstar_tp.engine.build import Engine
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.recording.entries import FORMAT, LoraSizes, Start, schema_hash
from mstar_tp.wire.reports import Ready, Target
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey


def pools_of(engine: Engine) -> tuple[LoraAdapterPool, ...]:
    """One a stage, in graph order; none without adapters."""
    return () if engine.lora is None else engine.lora.pools


def ready(engine: Engine, rank: int) -> Ready:
    """Return what the frontend is told of a rank that serves from now on."""
    targets = [target for pool in pools_of(engine) for target in pool.spec.targets]
    return Ready(
        rank=rank,
        cores=engine.model.cores,
        vocab_size=engine.model_config.vocab_size,
        max_model_len=engine.max_model_len,
        num_pages=engine.kv.table.num_pages,
        page_size=engine.kv.table.page_size,
        eos_token_ids=engine.model_config.eos_ids,
        targets=tuple(
            Target(
                name=target.name,
                in_features=target.in_features,
                out_features=sum(part.out_features for part in target.out_slices),
            )
            for target in targets
        ),
    )


def recording_start(
    engine: Engine,
    *,
    rank: int,
    world_size: int,
    epoch: int,
    config_digest: str,
    deferred: bool,
) -> Start:
    """The first entry of a recording: what its replay builds the tables from."""
    return Start(
        format=FORMAT,
        schema=schema_hash(),
        version=VERSION,
        rank=rank,
        world_size=world_size,
        epoch=epoch,
        config_digest=config_digest,
        num_pages=engine.kv.table.num_pages,
        page_size=engine.kv.table.page_size,
        num_host_pages=engine.kv.kept.host.num_pages,
        lora=tuple(_lora_sizes(pool) for pool in pools_of(engine)),
        deferred=deferred,
        prefix_caching=engine.kv.sharing.enabled,
    )


def _lora_sizes(pool: LoraAdapterPool) -> LoraSizes:
    spec = pool.spec
    configured = tuple(AdapterKey(name, FIRST_GENERATION) for name, _ in spec.adapters)
    return LoraSizes(
        stage=pool.stage.name,
        of_images=pool.stage.image_tokens is not None,
        slots=spec.slots,
        cpu_capacity=spec.cpu_capacity,
        cpu_unit=spec.cpu_unit,
        adapters=configured,
        pinned=tuple(key for key in configured if pool.loads.limits(key).pinned),
    )
