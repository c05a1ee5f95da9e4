"""Module names of adapter files -> places in the model. No torch.

Files name one module in many ways: with PEFT's own prefix or without, from the model with its head
or from the decoder alone, through wrappers that training put around it, or as one word (Kohya).
What is left when prefixes and wrappers are gone must be a module of the spec, exactly.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mstar_tp.lora.keys import Key, Spelling
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget

_PREFIXES = re.compile(r"base_model|model|module|language_model|llm|text_encoder(_\d+)?")
"""Words that may stand before a module's name without changing which module it is."""
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Words that torch.compile, FSDP and activation checkpointing put anywhere into a name."""
_KOHYA_PREFIX = re.compile(
    r"(?:lora|lycoris)_(?:te\d*_|text_encoder(?:_\d+)?_|llm_)?(?:(?:base_|language_)?model_)*"
)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def core_name(module: str) -> str:
    """What is left of a file's name of a module without prefixes and wrappers."""
    return _core(module)


def kohya_word(word: str) -> str:
    """What is left of a Kohya key's word without the prefixes that name no module."""
    return _KOHYA_PREFIX.sub("", word, count=1)


class ModulePlace(NamedTuple):
    """A module of the base model: slices ``slices`` of one layer of a target. Several slices: the
    adapter was trained on the fused linear. ``name`` is the checkpoint's.
    """

    target: LoraTarget
    layer: int
    slices: tuple[int, ...]
    name: str


class PlaceError(Exception):
    """Why a module has no place: a sentence's end after the key."""


class ModuleIndex:
    """Every module of a spec by name."""

    def __init__(self, spec: LoraSpec) -> None:
        self._layers = spec.layer_counts()
        self._places = spec.places()
        self._stacks = {_core(stack): stack for stack in self._layers if stack}
        self._outside = {_core(path): path for stack, path in self._places if not stack}
        self._words = {path.replace(".", "_"): path for stack, path in self._places if stack}
        self._outside_words = {c.replace(".", "_"): path for c, path in self._outside.items()}
        assert len(self._stacks) == len([s for s in self._layers if s]), "two stacks of one name"

    def find(self, key: Key) -> ModulePlace:
        """The key's module.

        Raises:
            PlaceError: the model has no such module, or not so many layers.
        """
        if key.spelling is Spelling.KOHYA:
            return self._find_word(key.module)
        core = _core(key.module)
        if core in self._outside:
            return self._place("", 0, self._outside[core])
        for stack_core, stack in self._stacks.items():
            if core.startswith(f"{stack_core}."):
                index, _, path = core.removeprefix(f"{stack_core}.").partition(".")
                layer = self._layer(stack_core, stack, index)
                if (stack, path) not in self._places:
                    raise PlaceError(f"adapts {path} of a layer, which is none of {self.known()}")
                return self._place(stack, layer, path)
        raise PlaceError(f"adapts {key.module}, which is none of {self.known()}")

    def single(self, name: str) -> ModulePlace | None:
        """The module outside every stack whose name ends in ``name``."""
        found = [path for path in self._outside.values() if path.rpartition(".")[2] == name]
        return self._place("", 0, found[0]) if len(found) == 1 else None

    def known(self) -> str:
        """The names that factors may have, for a message."""
        named = {
            path
            for (_, path), (target, _) in self._places.items()
            if target.parallel is not LoraParallel.NORM
        }
        return ", ".join(sorted(named))

    def _find_word(self, word: str) -> ModulePlace:
        rest = _KOHYA_PREFIX.sub("", word, count=1)
        if rest in self._outside_words:
            return self._place("", 0, self._outside_words[rest])
        for core, stack in self._stacks.items():
            match = re.fullmatch(rf"{core.replace('.', '_')}_([0-9]+)_(.+)", rest)
            if match is None:
                continue
            layer = self._layer(core, stack, match[1])
            path = self._words.get(match[2])
            if path is not None and (stack, path) in self._places:
                return self._place(stack, layer, path)
        raise PlaceError(
            f"is a Kohya key (there is no adapter_config.json) of {word}, which names no module of "
            f"this model: those are {self.known()}"
        )

    def _place(self, stack: str, layer: int, path: str) -> ModulePlace:
        target, slices = self._places[stack, path]
        name = f"{stack}.{layer}.{path}" if stack else path
        return ModulePlace(target, layer, slices, name)

    def _layer(self, core: str, stack: str, index: str) -> int:
        count = self._layers[stack]
        if not _INDEX.fullmatch(index):
            raise PlaceError(f"{index[:40]!r} is no layer number of {core}")
        if int(index) >= count:
            raise PlaceError(
                f"names {core}.{index}, but the base model has {count} layers (0 to {count - 1})"
            )
        return int(index)


def _core(module: str) -> str:
    """The name without prefixes and wrappers."""
    words = [word for word in module.split(".") if word not in _WRAPPERS]
    first = next((i for i, word in enumerate(words) if not _PREFIXES.fullmatch(word)), len(words))
    return ".".join(words[first:])
