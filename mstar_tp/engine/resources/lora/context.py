"""The surroundings of a pool: the device's slots, or what a test or a replay has in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mstar_tp.engine.resources.lora.admit import Weights
from mstar_tp.engine.resources.lora.cpu_cache.reads import Readers
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.stage import ONLY_STAGE, PoolStage
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.recording import NO_RECORDING, Recorder

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    import torch

    from mstar_tp.distributed.comm import JointGroups
    from mstar_tp.lora.device.delta_plan import DeltaPlan
    from mstar_tp.lora.device.expert_weights import ExpertWeights
    from mstar_tp.lora.device.norm_weights import NormWeights
    from mstar_tp.lora.device.slot_weights import Backend, SlotWeights
    from mstar_tp.lora.device.target_weights import LayerWeights
    from mstar_tp.lora.device.tiles import TileBuffer
    from mstar_tp.lora.device.vocab_weights import EmbeddingWeights, HeadWeights
    from mstar_tp.lora.reading.base_weights import BaseWeights


class PoolWeights(Weights, Protocol):
    """The device's slots, as a pool uses them."""

    def plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        sampled: Sequence[int] = (),
        tables: TileBuffer | None = None,
    ) -> DeltaPlan: ...
    def launched(self) -> None: ...
    def reap(self) -> None: ...
    def graph_tables(self, num_rows: int) -> TileBuffer | None: ...
    def captured_plan(self, tables: TileBuffer, num_rows: int) -> DeltaPlan: ...
    def can_capture(self, slots: Sequence[int]) -> bool: ...
    def filled(self, seed: int) -> AbstractContextManager[None]: ...
    def layer(self, target: str, layer: int) -> LayerWeights: ...
    def experts(self, target: str) -> ExpertWeights: ...
    def embedding(self, target: str) -> EmbeddingWeights: ...
    def head(self, target: str) -> HeadWeights: ...
    def norm(self, target: str) -> NormWeights: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContext:
    """The recorder of a pool, and fakes of its device and its disk (None: the real ones).

    ``wrap_readers`` puts a test's faults between the pool and its reader threads; ``base`` answers
    for copies of base weights in adapter files; ``others`` are the specs of the model's other
    stages.
    """

    recorder: Recorder = NO_RECORDING
    wrap_readers: Callable[[Readers], Readers] = lambda readers: readers
    weights: PoolWeights | None = None
    store: LoraAdapterStore | None = None
    base: BaseWeights | None = None
    others: tuple[LoraSpec, ...] = ()
    stage: PoolStage = ONLY_STAGE
    invariant: bool = False
    """True when, on a CUDA device, a row's bits must not depend on the rows beside it."""
    backend: Backend = "auto"
    """The kernels that apply deltas."""
    roots: tuple[str, ...] = ()
    """Real paths of the folders that adapters loaded at run time must lie in; none: anywhere."""


def device_slots(
    spec: LoraSpec,
    groups: JointGroups,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    invariant: bool = False,
    backend: Backend = "auto",
) -> SlotWeights:
    """This rank's slots on its device."""
    import torch

    from mstar_tp.lora.device.slot_weights import SlotWeights

    return SlotWeights(
        spec,
        rank=groups.tp.rank,
        world_size=groups.tp.world_size,
        device=torch.device(device),
        dtype=dtype,
        invariant=invariant,
        backend=backend,
    )
