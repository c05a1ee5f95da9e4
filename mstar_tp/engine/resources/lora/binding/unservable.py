"""The modules that a model declares no adapter may change.

A module states ``lora_unservable``: child -> reason, where it runs a child's weight other than
through the child's forward over the step's tokens, on any device or under compile: projections that
are folded or fused at load, that run over an encoder's rows, or that encode positions. An adapter
that touches such a child would be left out in silence; it is refused with the reason instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.module_names import join_words


def declared_unservable(root: nn.Module) -> dict[str, str]:
    """Path in ``root`` -> reason, of every child that a module under it declares.

    Raises:
        ConfigError: a declared child does not exist, or its reason is empty.
    """
    found: dict[str, str] = {}
    for path, module in root.named_modules():
        children = getattr(module, "lora_unservable", {})
        assert isinstance(children, Mapping), f"{path}.lora_unservable is no mapping"
        for child, reason in children.items():
            if not child or not reason:
                raise ConfigError(
                    f"{path or 'the model'}: lora_unservable has {child!r}: {reason!r}, wanted a "
                    "child and a reason"
                )
            try:
                module.get_submodule(child)
            except AttributeError:
                raise ConfigError(
                    f"{path or 'the model'}: lora_unservable names {child}, but "
                    f"{type(module).__name__} has no such child"
                ) from None
            found[join_words((path, child))] = reason
    return found


def reason_for(path: str, declared: Mapping[str, str]) -> str | None:
    """The reason why no adapter may change the module at ``path``; None where it may.

    The module or one that it lies in is declared; the closest counts.
    """
    words = path.split(".")
    ways = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((declared[way] for way in ways if way in declared), None)
