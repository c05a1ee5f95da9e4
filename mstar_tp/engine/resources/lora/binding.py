"""From a model's own modules to LoRA targets, and back: the spec is built by walking them, then
they are bound.

Adapters are placed exactly as weights are: a module's slices name its parts of the checkpoint. A
ModuleList (found by type, not by name) whose entries are alike is one stack.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.errors import ConfigError
from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.layers.linear import ParallelLinear, RowParallelLinear
from mstar_tp.layers.lora_embedding import ParallelHeadWithLora, VocabParallelEmbeddingWithLora
from mstar_tp.layers.lora_linear import TWINS, WithLoraDelta
from mstar_tp.layers.lora_norm import RMSNormWithLora
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.lora.deltas import LoraEmbeddingDelta, LoraHeadDelta, LoraNormDelta
from mstar_tp.lora.spec import LoraParallel, LoraTarget, RowGrouping


@dataclass(frozen=True, slots=True)
class _Site:
    """One module that adapters may change: where it stands (outside a stack: ``stack`` empty), and
    what it is.
    """

    stack: str
    layer: int
    path: str
    module: ParallelLinear | RMSNorm

    @property
    def shape(self) -> tuple[object, ...]:
        if isinstance(self.module, RMSNorm):
            return (self.module.size,)
        return (self.module.in_features, self.module.slices, self.module.parallel)


def module_lora_targets(
    root: nn.Module, *, exclude: Collection[str] = ()
) -> tuple[LoraTarget, ...]:
    """The targets of ``root``'s parallel linears and norms, one a role of each stack, in the
    modules' order; then its embedding and its head.

    ``exclude``: regular expressions of module paths that no adapter may change.

    Raises:
        ConfigError: a stack's layers differ in shape, or a pattern of ``exclude`` matches nothing.
    """
    targets: dict[tuple[str, str], LoraTarget] = {}
    first: dict[tuple[str, str], _Site] = {}
    counts: dict[tuple[str, str], int] = {}
    excluded = _Excluded(exclude)
    for site in _sites(root, excluded):
        role = (site.stack, site.path)
        if site.shape != first.setdefault(role, site).shape:
            raise ConfigError(
                f"{site.stack}.{site.layer}.{site.path} differs in shape from layer "
                f"{first[role].layer}'s: adapters "
                "cannot be served on such a stack"
            )
        counts[role] = counts.get(role, 0) + 1
    for role, site in first.items():
        targets[role] = _target(site, num_layers=_stack_size(root, site.stack), name=site.path)
        if counts[role] != targets[role].num_layers:
            raise ConfigError(f"{site.stack}: only {counts[role]} of its layers have {site.path}")
    ends = [_end_target(path, end) for path, end in _ends(root) if not excluded.names(path)]
    excluded.check_used()
    return (*targets.values(), *ends)


def bind(root: nn.Module, pool: LoraAdapterPool) -> int:
    """Swap every module of the pool's targets to its twin, which adds the delta; how many were
    bound.
    """
    wanted = {(target.stack, target.name): target for target in pool.spec.targets}
    bound = 0
    for site in _sites(root, _Excluded(())):
        target = wanted.get((site.stack, site.path))
        if target is None:
            continue
        _bind_site(site, target, pool)
        bound += 1
    for path, end in _ends(root):
        if ("", path) in wanted:
            _bind_end(path, end, pool)
            bound += 1
    assert bound == sum(target.num_layers for target in wanted.values()), (
        "a target matches no module"
    )
    return bound


class _Excluded:
    """Patterns of module paths that no adapter may change, and which of them matched."""

    def __init__(self, patterns: Collection[str]) -> None:
        self._unused = dict.fromkeys(patterns)
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def names(self, path: str) -> bool:
        hits = [p.pattern for p in self._patterns if p.fullmatch(path)]
        for pattern in hits:
            self._unused.pop(pattern, None)
        return bool(hits)

    def check_used(self) -> None:
        for pattern in self._unused:
            raise ConfigError(f"exclude pattern {pattern!r} matches no module that adapters change")


def _sites(root: nn.Module, excluded: _Excluded) -> list[_Site]:
    stacks = [name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    sites = []
    for name, module in root.named_modules():
        if not isinstance(module, (ParallelLinear, RMSNorm)) or excluded.names(name):
            continue
        stack = next((s for s in stacks if name.startswith(f"{s}.")), None)
        if stack is None and isinstance(module, RMSNorm):
            sites.append(_Site("", 0, name, module))
        elif stack is not None:
            index, _, path = name.removeprefix(f"{stack}.").partition(".")
            sites.append(_Site(stack, int(index), path, module))
    return sites


def _ends(root: nn.Module) -> list[tuple[str, VocabParallelEmbedding | ParallelHead]]:
    """The modules along the vocabulary, by path."""
    kinds = (VocabParallelEmbedding, ParallelHead)
    return [(name, module) for name, module in root.named_modules() if isinstance(module, kinds)]


def _end_target(path: str, module: VocabParallelEmbedding | ParallelHead) -> LoraTarget:
    vocab, hidden = module.shard.vocab_size, module.hidden_size
    embeds = isinstance(module, VocabParallelEmbedding)
    size_in, size_out = (vocab, hidden) if embeds else (hidden, vocab)
    return LoraTarget(
        name=path,
        stack="",
        num_layers=1,
        parent=path.rpartition(".")[0],
        in_features=size_in,
        out_slices=(OutSlice(name=module.name, out_features=size_out, units=size_out),),
        parallel=LoraParallel.VOCAB_IN if embeds else LoraParallel.VOCAB_OUT,
        in_units=size_in,
        row_grouping=RowGrouping.TOKENS if embeds else RowGrouping.SAMPLED,
        tied=isinstance(module, ParallelHead) and module.is_tied,
    )


def _bind_site(site: _Site, target: LoraTarget, pool: LoraAdapterPool) -> None:
    module: nn.Module = site.module
    if isinstance(module, RMSNorm):
        weights, normed = pool.weights.norm(target.name), module.forward_with
        module.__class__ = RMSNormWithLora
        assert isinstance(module, RMSNormWithLora)
        module.lora_delta = LoraNormDelta(pool, weights, site.layer, normed)
        return
    assert isinstance(module, ParallelLinear)
    module.__class__ = TWINS[type(module)]
    assert isinstance(module, WithLoraDelta)
    module.lora_delta = pool.layer_delta(target.name, site.layer)


def _bind_end(path: str, module: nn.Module, pool: LoraAdapterPool) -> None:
    if isinstance(module, VocabParallelEmbedding):
        module.__class__ = VocabParallelEmbeddingWithLora
        assert isinstance(module, VocabParallelEmbeddingWithLora)
        module.lora_delta = LoraEmbeddingDelta(pool, pool.weights.embedding(path))
    else:
        module.__class__ = ParallelHeadWithLora
        assert isinstance(module, ParallelHeadWithLora)
        module.lora_delta = LoraHeadDelta(pool, pool.weights.head(path))


def _stack_size(root: nn.Module, stack: str) -> int:
    if not stack:
        return 1
    modules = root.get_submodule(stack)
    assert isinstance(modules, nn.ModuleList)
    return len(modules)


def _target(site: _Site, *, num_layers: int, name: str) -> LoraTarget:
    module = site.module
    if isinstance(module, RMSNorm):
        return LoraTarget(
            name=name,
            stack=site.stack,
            num_layers=num_layers,
            parent=site.path.rpartition(".")[0],
            in_features=module.size,
            out_slices=(OutSlice(name=module.name, out_features=module.size, units=1),),
            parallel=LoraParallel.NORM,
            in_units=module.size,
        )
    row = isinstance(module, RowParallelLinear)
    return LoraTarget(
        name=name,
        stack=site.stack,
        num_layers=num_layers,
        parent=site.path.rpartition(".")[0],
        in_features=module.in_features,
        out_slices=module.slices,
        parallel=LoraParallel.ROW if row else LoraParallel.COLUMN,
        in_units=module.in_features,
    )
