"""Swapping a stage's modules to their LoRA twins, where the walk found them.

At start, before any step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mstar_tp.common.errors import ConfigError
from mstar_tp.engine.resources.lora.binding.families import Family, family_of
from mstar_tp.layers.lora.linear import is_bound

if TYPE_CHECKING:
    from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
    from mstar_tp.lora.spec import LoraSite


def bind(root: nn.Module, pool: LoraAdapterPool) -> int:
    """Swap every module of the pool's targets, but for the deferred ones, to its twin, which adds
    the delta; how many were bound. ``root`` is the node that the pool's spec was walked from.
    """
    return _bind(root, pool, deferred=False)


def bind_deferred(root: nn.Module, pool: LoraAdapterPool) -> int:
    """Swap the modules that the walk deferred; how many.

    The model calls it once they are as they stay: until then its adapters would be served without
    them.
    """
    return _bind(root, pool, deferred=True)


def check_bound(root: nn.Module, pool: LoraAdapterPool) -> None:
    """Every module of the pool's targets is bound.

    Raises:
        ConfigError: naming one that is not, whose adapters would be left out in silence.
    """
    for site in pool.spec.sites:
        if not is_bound(root.get_submodule(site.path)):
            why = "deferred, and never bound by the model" if site.deferred else "not bound"
            raise ConfigError(f"{site.path} is {why}: no delta would be added to it")


def _bind(root: nn.Module, pool: LoraAdapterPool, *, deferred: bool) -> int:
    sites = [site for site in pool.spec.sites if site.deferred is deferred]
    for site in sites:
        module = root.get_submodule(site.path)
        _family(module, site).bind(module, pool, site.target, site.layer)
    return len(sites)


def _family(module: nn.Module, site: LoraSite) -> Family:
    family = family_of(module)
    assert isinstance(family, Family), f"{site.path} is no longer what the walk found"
    return family
