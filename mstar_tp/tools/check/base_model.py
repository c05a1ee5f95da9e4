"""A base model without its weights, whose files' headers are validated against it.

It is built on the meta device for every rank. Needs torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from mstar_tp.common.errors import CheckpointError, ConfigError
from mstar_tp.common.problems import Problems
from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.distributed.comm import AgreeOp, SingleGroup
from mstar_tp.engine.base_weights import CheckpointWeights
from mstar_tp.engine.build_lora import lora_specs
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.lora.format.checkpoint import AdapterFile, Survey, survey_adapter
from mstar_tp.lora.reading.base_weights import BaseWeights
from mstar_tp.lora.reading.shards import read_adapter, shard_bytes
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.lora.stage_specs import ModelLoraSpecs, joint_digest
from mstar_tp.models import loader as load
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import ModelConfig, load_model_config
from mstar_tp.models.loader import resolve_dtype
from mstar_tp.models.registry import rules_of
from mstar_tp.tools.check.findings import ModelFindings, ModelTarget
from mstar_tp.tools.check.sizes import held_bytes, packing_bytes, slot_bytes
from mstar_tp.wire.values import AdapterKey

MAX_PROBLEMS = 500
MOST_RANKS = 16
"""Sizes up to here are tried when a model cannot be split as asked."""


class PlannedGroup:
    """A rank's place in a group that does not run: whoever calls a collective is at fault."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._refuse()

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self._refuse()

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        self._refuse()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._refuse()

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("a planned group runs no collective")


@dataclass(slots=True, kw_only=True)
class PlannedModel:
    """A model as its ranks would build it.

    ``ranks`` is empty where it cannot be split so; then ``whole``, one rank's, says what modules
    there are. ``problems`` are in the order found.
    """

    config: ModelConfig
    dtype: torch.dtype
    whole: CausalLM
    ranks: tuple[CausalLM, ...]
    world_size: int
    problems: tuple[str, ...]

    def findings(self, path: str) -> ModelFindings:
        return ModelFindings(
            path=path,
            architecture=self.config.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            num_layers=self.config.num_layers,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            max_position=self.config.max_position,
            tensor_parallel_size=self.world_size,
            weight_bytes=self.weight_bytes(on_cpu=False) if self.ranks else None,
            targets=self._targets(),
        )

    def weight_bytes(self, *, on_cpu: bool) -> tuple[int, ...]:
        """The bytes of weights of each rank; ``on_cpu``: with the bytes that packing adds there."""
        return tuple(
            held_bytes(model) + (packing_bytes(model, self.dtype) if on_cpu else 0)
            for model in self.ranks
        )

    def specs(self, lora: LoraConfig) -> ModelLoraSpecs:
        """The modules that adapters may change, stage by stage.

        Raises:
            ConfigError: adapters cannot be served on this model.
        """
        return lora_specs(lora, self.whole, self.dtype)

    def _targets(self) -> tuple[ModelTarget, ...]:
        try:
            specs = self.specs(LoraConfig())
        except ConfigError:
            return ()  # the deployment's own block says so
        return tuple(
            ModelTarget(
                name=target.name,
                layers=target.num_layers if target.stack else 0,
                in_features=target.in_features,
                out_features=target.out_features,
                kind=target.parallel.value,
            )
            for spec in specs.stages.values()
            for target in spec.targets
        )


def plan_model(engine: EngineConfig) -> PlannedModel:
    """Build the model of ``engine`` for each of its ranks and validate its weight files' headers.

    Raises:
        MstarError: there is no such model, or its config.json cannot be served: nothing more can be
            said of it.
    """
    problems = Problems(MAX_PROBLEMS)
    config: ModelConfig | None = None
    with problems:
        config = load_model_config(engine.model, problems)
    if config is None:
        raise CheckpointError("\n".join(problems.texts))
    dtype = resolve_dtype(engine.dtype, config)
    limit = min(engine.max_model_len or config.max_position, config.max_position)
    whole = load.plan_model(config, SingleGroup(), dtype, max_position=limit)
    try:
        load.survey_weights(engine.model, whole, problems)
    except CheckpointError:
        pass  # the last that was wanted
    texts, ranks, world_size = list(problems.texts), [], engine.tensor_parallel_size
    try:
        for rank in range(world_size):
            group = PlannedGroup(rank, world_size)
            ranks.append(load.plan_model(config, group, dtype, max_position=limit))
    except ConfigError as error:
        fits = ", ".join(map(str, _sizes(config, dtype)))
        texts.append(f"{error} (this model can be split over {fits})")
        ranks = []
    return PlannedModel(
        config=config,
        dtype=dtype,
        whole=whole,
        ranks=tuple(ranks),
        world_size=world_size,
        problems=tuple(texts),
    )


def _sizes(config: ModelConfig, dtype: torch.dtype) -> list[int]:
    """The numbers of ranks that the model can be split over."""
    found = []
    for world_size in range(1, MOST_RANKS + 1):
        with contextlib.suppress(ConfigError):
            load.plan_model(config, PlannedGroup(0, world_size), dtype, max_position=1)
            found.append(world_size)
    return found


def validator_of(model: PlannedModel, path: str, lora: LoraConfig) -> ModelValidator:
    """The validator of adapters of ``model``, which lies at ``path``.

    Raises:
        ConfigError: adapters cannot be served on this model.
    """
    base = CheckpointWeights(path, rules_of(model.config.architecture).own)
    return ModelValidator(model.specs(lora).stages, len(model.ranks), model.dtype, base)


class ModelValidator:
    """Validates adapters as the ranks of a model do.

    The ranks' own stores, one a stage, check, charge and size them; a read is that of one rank
    which holds all of the model.
    """

    def __init__(
        self,
        stages: Mapping[str, LoraSpec],
        world_size: int,
        dtype: torch.dtype,
        base: BaseWeights | None,
    ) -> None:
        """Take ``stages``: name -> spec, in graph order.

        ``world_size`` is 0 where the model cannot be split as asked, so that no sizes are known.
        ``base`` answers for copies of base weights.
        """
        self._nodes = stages
        self._world_size = world_size
        self._dtype = dtype
        self._base = base
        self._records: dict[str, tuple[AdapterRecord, ...]] = {}
        self._stores = [
            LoraAdapterStore(spec, 0, max(world_size, 1), False, dtype, others=self._others(stage))
            for stage, spec in stages.items()
        ]

    def check(self, name: str, path: str) -> AdapterFile:
        files, records = [], []
        for store in self._stores:
            file = store.checker.check(name, path)
            record = AdapterRecord.of(file, path)
            store.charge(record)
            files.append(file)
            records.append(record)
        self._records[name] = tuple(records)
        return _joined(files)

    def survey(self, name: str, path: str) -> Survey:
        stage, spec = next(iter(self._nodes.items()))
        return survey_adapter(lambda headers: spec, name, path, others=self._others(stage))

    def _others(self, stage: str) -> tuple[LoraSpec, ...]:
        return tuple(spec for name, spec in self._nodes.items() if name != stage)

    def host_bytes(self, file: AdapterFile) -> tuple[int, ...] | None:
        if not self._world_size:
            return None
        parts = self._records[file.adapter]
        return tuple(
            sum(
                shard_bytes(store.spec, part, rank, self._world_size, self._dtype)
                for store, part in zip(self._stores, parts, strict=True)
            )
            for rank in range(self._world_size)
        )

    def read(self, key: AdapterKey, file: AdapterFile) -> str | None:
        # One rank's reading of everything: what any of several would find in its share.
        digests: dict[str, str] = {}
        for (stage, spec), store in zip(self._nodes.items(), self._stores, strict=True):
            part = store.checker.check(key.name, self._records[key.name][0].path)
            if len(self._stores) > 1 and not part.targets:
                continue
            digests[stage] = read_adapter(
                spec,
                key,
                part,
                rank=0,
                world_size=1,
                dtype=self._dtype,
                page_locked=False,
                base=self._base,
            ).digest
        return next(iter(digests.values())) if len(self._stores) == 1 else joint_digest(digests)

    def check_slots(self) -> None:
        """Raise AdapterError if the CPU cache's bytes cannot fill the slots."""
        for number, store in enumerate(self._stores):
            store.check_slots([records[number] for records in self._records.values()])

    def slot_bytes(self) -> tuple[int, ...] | None:
        """One slot of each rank."""
        if not self._world_size:
            return None
        specs = [replace(spec, slots=1) for spec in self._nodes.values()]
        return tuple(
            sum(slot_bytes(spec, rank, self._world_size, self._dtype) for spec in specs)
            for rank in range(self._world_size)
        )


def _joined(files: Sequence[AdapterFile]) -> AdapterFile:
    """The parts of one adapter that several nodes have, as one."""
    if len(files) == 1:
        return files[0]
    return replace(
        files[0],
        modules=tuple(module for file in files for module in file.modules),
        rows=tuple(rows for file in files for rows in file.rows),
        norms=tuple(norm for file in files for norm in file.norms),
        copies=tuple(copy for file in files for copy in file.copies),
        notes=tuple(dict.fromkeys(note for file in files for note in file.notes)),
    )
