"""Swaps a stage's modules to their LoRA twins where the walk found them, at start."""

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
    """Swap every module of the pool's targets to its twin, which adds the delta; return how many.

    ``root`` is the stage that the pool's spec was walked from.
    """
    for site in pool.spec.sites:
        module = root.get_submodule(site.path)
        _family(module, site).bind(module, pool, site.target, site.layer)
    return len(pool.spec.sites)


def check_bound(root: nn.Module, pool: LoraAdapterPool) -> None:
    """Check that every module of the pool's targets is bound.

    Raises:
        ConfigError: naming one that is not, whose adapters would be left out in silence.
    """
    for site in pool.spec.sites:
        if not is_bound(root.get_submodule(site.path)):
            raise ConfigError(f"{site.path} is not bound: no delta would be added to it")


def _family(module: nn.Module, site: LoraSite) -> Family:
    family = family_of(module)
    assert isinstance(family, Family), f"{site.path} is no longer what the walk found"
    return family
