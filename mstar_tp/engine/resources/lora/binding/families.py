"""The kinds of modules that adapters may change, each with its shape and its twin.

A module is of a family when its class is the family's own, or the twin. A subclass is of none: it
may run the weight in a way of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.layers.linear import ParallelLinear, RowParallelLinear
from mstar_tp.layers.lora.embedding import ParallelHeadWithLora, VocabParallelEmbeddingWithLora
from mstar_tp.layers.lora.linear import TWINS
from mstar_tp.layers.lora.moe import ExpertLinearWithLora
from mstar_tp.layers.lora.norm import RMSNormWithLora
from mstar_tp.layers.lora.plain import (
    LinearWithLora,
    PatchConv2dWithLora,
    PatchConv3dWithLora,
    PatchConvWithLora,
    patch_obstacle,
)
from mstar_tp.layers.moe import ExpertLinear
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.layers.patches import PatchConv
from mstar_tp.lora.device.deltas import LoraEmbeddingDelta, LoraHeadDelta, LoraNormDelta
from mstar_tp.lora.device.expert_deltas import LoraExpertDelta
from mstar_tp.lora.spec import LoraParallel
from mstar_tp.lora.stage_rows import RowGrouping

if TYPE_CHECKING:
    from mstar_tp.engine.resources.lora.pool import LoraAdapterPool

OWN_NAME = ""
"""The slice name that stands for the module's own name in its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a module, in ``LoraTarget``'s terms.

    ``slices`` are named as the checkpoint has them under the module's parent. Modules of one stack
    are alike in all of it.
    """

    in_features: int
    slices: tuple[OutSlice, ...]
    parallel: LoraParallel
    rows: RowGrouping = RowGrouping.TOKENS
    tied: bool = False
    conv: tuple[int, ...] = ()
    routed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of modules that adapters may change, and its twin.

    ``describe(module)`` gives its shape, or why no adapter can change it; ``delta(module, pool,
    target, layer)`` gives the call of its twin.
    """

    kind: type[nn.Module]
    twin: type[nn.Module]
    describe: Callable[[nn.Module], Shape | str]
    delta: Callable[[nn.Module, LoraAdapterPool, str, int], object]

    def bind(self, module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> None:
        """Swap the module to its twin, which adds ``pool``'s deltas of this layer of a target."""
        delta = self.delta(module, pool, target, layer)
        module.__class__ = self.twin
        module.lora_delta = delta  # type: ignore[assignment]  # no parameter, so no child


def family_of(module: nn.Module) -> Family | str | None:
    """The module's family; why it has none though it is like one; None for anything else."""
    family = _FAMILIES.get(type(module))
    if family is not None:
        return family
    if isinstance(module, _LIKE_ONE):
        return (
            f"it is a {type(module).__name__}, which may run its weight in a way of its own: no "
            "twin of it adds deltas"
        )
    return None


def _layer_delta(module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> object:
    return pool.deltas.layer_delta(target, layer)


def _expert_delta(module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> object:
    return LoraExpertDelta(pool.deltas, pool.weights.experts(target))


def _norm_delta(module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> object:
    assert isinstance(module, RMSNorm)
    return LoraNormDelta(pool.deltas, pool.weights.norm(target), layer, module)


def _embedding_delta(module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> object:
    return LoraEmbeddingDelta(pool.deltas, pool.weights.embedding(target))


def _head_delta(module: nn.Module, pool: LoraAdapterPool, target: str, layer: int) -> object:
    return LoraHeadDelta(pool.deltas, pool.weights.head(target))


def _parallel_linear(module: nn.Module) -> Shape:
    assert isinstance(module, ParallelLinear)
    row = isinstance(module, RowParallelLinear)
    return Shape(
        in_features=module.in_features,
        slices=module.slices,
        parallel=LoraParallel.ROW if row else LoraParallel.COLUMN,
    )


def _expert_linear(module: nn.Module) -> Shape:
    assert isinstance(module, ExpertLinear)
    return Shape(
        in_features=module.in_features,
        slices=module.slices,
        parallel=LoraParallel.ROW if module.parallel == "row" else LoraParallel.COLUMN,
        routed=True,
    )


def _norm(module: nn.Module) -> Shape:
    assert isinstance(module, RMSNorm)
    return Shape(
        in_features=module.size,
        slices=(OutSlice(name=module.name, out_features=module.size, units=1),),
        parallel=LoraParallel.NORM,
    )


def _embedding(module: nn.Module) -> Shape:
    assert isinstance(module, VocabParallelEmbedding)
    hidden = module.hidden_size
    return Shape(
        in_features=module.shard.vocab_size,
        slices=(OutSlice(name=module.name, out_features=hidden, units=hidden),),
        parallel=LoraParallel.VOCAB_IN,
    )


def _head(module: nn.Module) -> Shape:
    assert isinstance(module, ParallelHead)
    vocab = module.shard.vocab_size
    return Shape(
        in_features=module.hidden_size,
        slices=(OutSlice(name=module.name, out_features=vocab, units=vocab),),
        parallel=LoraParallel.VOCAB_OUT,
        rows=RowGrouping.SAMPLED,
        tied=module.is_tied,
    )


def _plain_linear(module: nn.Module) -> Shape:
    assert isinstance(module, nn.Linear)
    return Shape(
        in_features=module.in_features,
        slices=(OutSlice(name=OWN_NAME, out_features=module.out_features, units=1),),
        parallel=LoraParallel.REPLICATED,
    )


def _patch_conv(module: nn.Module) -> Shape | str:
    assert isinstance(module, (nn.Conv2d, nn.Conv3d))
    why_not = patch_obstacle(module)
    if why_not is not None:
        return why_not
    size = (module.in_channels, *module.kernel_size)
    return Shape(
        in_features=math.prod(size),
        slices=(OutSlice(name=OWN_NAME, out_features=module.out_channels, units=1),),
        parallel=LoraParallel.REPLICATED,
        conv=size,
    )


def _patch_gemm(module: nn.Module) -> Shape:
    assert isinstance(module, PatchConv)
    size, out = module.kernel, module.hidden_size
    return Shape(
        in_features=math.prod(size),
        slices=(OutSlice(name=module.name, out_features=out, units=1),),
        parallel=LoraParallel.REPLICATED,
        conv=size,
    )


_ALL = (
    *(Family(kind, twin, _parallel_linear, _layer_delta) for kind, twin in TWINS.items()),
    Family(ExpertLinear, ExpertLinearWithLora, _expert_linear, _expert_delta),
    Family(nn.Linear, LinearWithLora, _plain_linear, _layer_delta),
    Family(PatchConv, PatchConvWithLora, _patch_gemm, _layer_delta),
    Family(nn.Conv2d, PatchConv2dWithLora, _patch_conv, _layer_delta),
    Family(nn.Conv3d, PatchConv3dWithLora, _patch_conv, _layer_delta),
    Family(RMSNorm, RMSNormWithLora, _norm, _norm_delta),
    Family(VocabParallelEmbedding, VocabParallelEmbeddingWithLora, _embedding, _embedding_delta),
    Family(ParallelHead, ParallelHeadWithLora, _head, _head_delta),
)
_FAMILIES = {kind: family for family in _ALL for kind in (family.kind, family.twin)}
_LIKE_ONE = (
    ParallelLinear,
    RMSNorm,
    VocabParallelEmbedding,
    ParallelHead,
    ExpertLinear,
    PatchConv,
    nn.Linear,
    nn.modules.conv._ConvNd,
)
