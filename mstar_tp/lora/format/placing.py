"""Module names of adapter files -> places in the model. No torch.

Files name one module in many ways: with PEFT's own prefix or without, from the model with its head
or from the decoder alone, through wrappers that training put around it, or as one word (Kohya).
What is left when prefixes and wrappers are gone must be a module of one of the model's specs,
exactly. A model of several stages (a decoder and its vision tower) has a spec a stage: a module
belongs to the one that places it, and where two do, to the one that agrees with more of its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mstar_tp.common.module_names import CheckpointRules, join_words
from mstar_tp.lora.format.keys import Key, Spelling, without_nesting
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget

_PREFIXES = re.compile(r"base_model|model|module|language_model|llm|text_encoder(_\d+)?")
"""Words that may stand before a module's name without changing which module it is."""
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Words that torch.compile, FSDP and activation checkpointing put anywhere into a name."""
_KOHYA_PREFIX = re.compile(
    r"(?:lora|lycoris)_(?:te\d*_|text_encoder(?:_\d+)?_|llm_)?(?:(?:base_|language_)?model_)*"
)
_COMPONENT = re.compile(r"text_encoder(?:_\d+)?")
_KOHYA_COMPONENT = re.compile(r"(?:lora|lycoris)_(te\d*|text_encoder(?:_\d+)?)_")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def core_name(module: str) -> str:
    """A file's name of a module without prefixes and wrappers."""
    return _core(module)


def component_of(key: Key) -> str:
    """The text encoder, of several, that the key names; empty where it names none."""
    if key.spelling is Spelling.KOHYA:
        match = _KOHYA_COMPONENT.match(key.module)
        return match[1] if match else ""
    prefixes = itertools.takewhile(_PREFIXES.fullmatch, _words(key.module))
    return next((word for word in prefixes if _COMPONENT.fullmatch(word)), "")


def kohya_word(word: str) -> str:
    """A Kohya key's word without the prefixes that name no module."""
    return _KOHYA_PREFIX.sub("", word, count=1)


class ModulePlace(NamedTuple):
    """A module of the base model: slices ``slices`` of one layer of a target.

    With several slices the adapter was trained on the fused linear. ``name`` is the checkpoint's.
    """

    target: LoraTarget
    layer: int
    slices: tuple[int, ...]
    name: str


class PlaceError(Exception):
    """A module has no place; the text ends a sentence after the key and says why."""


class StagePlace(NamedTuple):
    """A place in the ``stage``-th of a model's specs."""

    stage: int
    place: ModulePlace


class ModelIndex:
    """Every module of a model's specs by name."""

    def __init__(self, specs: Sequence[LoraSpec]) -> None:
        self._stages = [ModuleIndex(spec) for spec in specs]

    def find(self, key: Key) -> StagePlace:
        """The key's module, and the number of the spec that places it.

        Raises:
            PlaceError: the model has no such module, or not so many layers; it is one that adapters
                may not change; or two specs have one of that name.
        """
        found: list[tuple[str, StagePlace | _Refused]] = []
        misses: list[_Miss] = []
        for number, stage in enumerate(self._stages):
            answer = stage.find(key)
            if isinstance(answer, _Miss):
                misses.append(answer)
            else:
                mine = answer if isinstance(answer, _Refused) else StagePlace(number, answer)
                found.append((answer.name, mine))
        if not found:
            raise PlaceError(self._why_none(key, misses))
        best = found[0][1] if len(found) == 1 else _closest(key, found)
        if isinstance(best, _Refused):
            raise PlaceError(best.reason)
        return best

    def experts(self, key: Key) -> tuple[int, Sequence[LoraTarget]] | None:
        """The list of experts that a key names, wrapped or not.

        It is the number of the spec that has them, and their linears.
        """
        module = without_nesting(key.module)
        for number, stage in enumerate(self._stages):
            found = stage.experts(module)
            if found:
                return number, found
        return None

    def _why_none(self, key: Key, misses: Sequence[_Miss]) -> str:
        told = next((miss.why for miss in misses if miss.why), None)
        if told is not None:
            return told
        known = ", ".join(sorted({name for stage in self._stages for name in stage.names()}))
        if key.spelling is Spelling.KOHYA:
            return (
                f"is a Kohya key (there is no adapter_config.json) of {key.module}, which names no "
                f"module of this model: those are {known}"
            )
        return f"adapts {key.module}, which is none of {known}"


class _Miss(NamedTuple):
    """No such module here; ``why`` where the name comes close."""

    why: str = ""


class _Refused(NamedTuple):
    """A module that no adapter may change."""

    name: str
    reason: str


class ModuleIndex:
    """Every module of one spec by name."""

    def __init__(self, spec: LoraSpec) -> None:
        self._layers = spec.layer_counts()
        self._places = spec.places()
        # Prefixes that may be left out are gone by then, and with them many rules' point.
        rules = {_core(spelled): _core(own) for spelled, own in spec.module_map.prefixes}
        kept = tuple((spelled, own) for spelled, own in rules.items() if spelled)
        self._map = CheckpointRules(kept, spec.module_map.words)
        self._stacks = {_core(stack): stack for stack in self._layers if stack}
        self._outside = {_core(path): path for stack, path in self._places if not stack}
        self._words = {path.replace(".", "_"): path for stack, path in self._places if stack}
        self._outside_words = {c.replace(".", "_"): path for c, path in self._outside.items()}
        self._unservable = {_core(name): (name, reason) for name, reason in spec.unservable}
        self._experts: dict[str, list[LoraTarget]] = {}
        """The linears of lists of experts, by the list."""
        for target in spec.targets:
            if target.routed:
                self._experts.setdefault(_core(target.stack), []).append(target)
        assert len(self._stacks) == len([s for s in self._layers if s]), "two stacks of one name"

    def experts(self, module: str) -> Sequence[LoraTarget]:
        """The linears of the experts that ``module`` lists, in their order."""
        return self._experts.get(self._map.own(_core(module)), ())

    def find(self, key: Key) -> ModulePlace | _Refused | _Miss:
        """The key's module here."""
        if key.spelling is Spelling.KOHYA:
            return self._find_word(key.module)
        core = self._map.own(_core(key.module))
        refused = self._refused(core)
        if refused is not None:
            return refused
        if core in self._outside:
            return self._place("", 0, self._outside[core])
        words = core.split(".")
        miss = _Miss()
        # Lists may stand in lists, experts in layers.
        for count in range(len(words) - 1, 0, -1):
            stack_core = ".".join(words[:count])
            stack = self._stacks.get(stack_core)
            if stack is None:
                continue
            layer, path = self._layer(stack_core, stack, words[count]), ".".join(words[count + 1 :])
            if not isinstance(layer, _Miss) and (stack, path) in self._places:
                return self._place(stack, layer, path)
            if miss.why:
                continue  # what the innermost list says is the closest
            if isinstance(layer, _Miss):
                miss = layer
            else:
                known = ", ".join(sorted(set(self.names())))
                miss = _Miss(f"adapts {path} of a layer, which is none of {known}")
        return miss

    def names(self) -> Iterator[str]:
        """The names that factors may have, for a message."""
        for (stack, path), (target, _) in self._places.items():
            if target.parallel is not LoraParallel.NORM:
                yield path or stack

    def _refused(self, core: str) -> _Refused | None:
        """The module, or one that it lies in, as one that adapters may not change: the closest."""
        if not self._unservable:
            return None
        words = core.split(".")
        for count in range(len(words), 0, -1):
            found = self._unservable.get(".".join(words[:count]))
            if found is not None:
                name, reason = found
                full = join_words((name, *words[count:]))
                return _Refused(full, f"adapts {full}, which no adapter may change: {reason}")
        return None

    def _find_word(self, word: str) -> ModulePlace | _Refused | _Miss:
        rest = _KOHYA_PREFIX.sub("", word, count=1)
        for spelled, own in sorted(self._map.prefixes, key=lambda rule: -len(rule[0])):
            flat = f"{spelled.replace('.', '_')}_"
            if rest.startswith(flat) or rest == flat[:-1]:
                words = (own.replace(".", "_"), rest[len(flat) :])
                rest = "_".join(word for word in words if word)
                break
        for spelled, own in self._map.words:
            rest = rest.replace(f"_{spelled}_", f"_{own}_")
        for core, (name, reason) in self._unservable.items():
            flat = core.replace(".", "_")
            if rest == flat or rest.startswith(f"{flat}_"):
                return _Refused(name, f"adapts {name}, which no adapter may change: {reason}")
        if rest in self._outside_words:
            return self._place("", 0, self._outside_words[rest])
        for core, stack in self._stacks.items():
            match = re.fullmatch(rf"{core.replace('.', '_')}_([0-9]+)(?:_(.+))?", rest)
            if match is None:
                continue
            layer = self._layer(core, stack, match[1])
            if isinstance(layer, _Miss):
                return layer
            path = self._words.get(match[2] or "")
            if path is not None and (stack, path) in self._places:
                return self._place(stack, layer, path)
        return _Miss()

    def _place(self, stack: str, layer: int, path: str) -> ModulePlace:
        target, slices = self._places[stack, path]
        return ModulePlace(target, layer, slices, target.named(layer, path))

    def _layer(self, core: str, stack: str, index: str) -> int | _Miss:
        count = self._layers[stack]
        if not _INDEX.fullmatch(index):
            return _Miss(f"{index[:40]!r} is no layer number of {core}")
        if int(index) >= count:
            return _Miss(
                f"names {core}.{index}, but the base model has {count} {core.rpartition('.')[2]} "
                f"(0 to {count - 1})"
            )
        return int(index)


def _closest(key: Key, found: Sequence[tuple[str, StagePlace | _Refused]]) -> StagePlace | _Refused:
    """The one of several stages' modules, each with its name, that the key means.

    Raises:
        PlaceError: two agree with as much of the key's name.
    """
    agreements = [_agreement(key.module, name) for name, _ in found]
    best = [
        answer for n, (_, answer) in zip(agreements, found, strict=True) if n == max(agreements)
    ]
    if len(best) > 1:
        raise PlaceError(
            f"adapts {key.module}, which may mean a module of several parts of the model: name it "
            "as the model's checkpoint does"
        )
    return best[0]


def _core(module: str) -> str:
    """The name without prefixes and wrappers."""
    words = _words(module)
    first = next((i for i, word in enumerate(words) if not _PREFIXES.fullmatch(word)), len(words))
    return ".".join(words[first:])


def _words(module: str) -> list[str]:
    return [word for word in module.split(".") if word not in _WRAPPERS]


def _agreement(module: str, name: str) -> int:
    """The number of last words that a file's and the checkpoint's name of a module share."""
    count = 0
    for mine, theirs in zip(reversed(_words(module)), reversed(name.split(".")), strict=False):
        if mine != theirs:
            break
        count += 1
    return count
