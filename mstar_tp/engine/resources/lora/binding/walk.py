"""A node's LoRA spec, from its own modules under the loader's checkpoint rules.

Nothing is stated by hand that the modules say: which may be adapted, their sizes, how they are
split, what they are called. A ModuleList or Sequential (found by type, not by name)
whose entries are alike in a role is one stack there; where they differ, each is a target of its
own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.module_names import AS_BUILT, CheckpointRules, join_words, rest_of, starts_with
from mstar_tp.engine.resources.lora.binding.families import (
    Family,
    Shape,
    family_of,
)
from mstar_tp.engine.resources.lora.binding.unservable import declared_unservable, reason_for
from mstar_tp.lora.spec import LoraSite, LoraSpec, LoraTarget, Unservable
from mstar_tp.lora.stage_rows import RowGrouping

EXCLUDED = "it is excluded from adapters here"


class _Entry(NamedTuple):
    """The place of a module in a list.

    ``role`` is its path within entry ``number`` of the ``size`` that the list at ``stack`` has;
    ``names`` are its own and its slices', there.
    """

    stack: str
    number: int
    size: int
    role: str
    names: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        return self.stack, self.role, self.names

    @property
    def known_as(self) -> str:
        """Its role; of an entry that is the module itself, the list's own name."""
        return self.role or self.stack.rpartition(".")[2]


@dataclass(slots=True)
class _Module:
    """One module that adapters may change.

    ``names`` are its own and its slices'; ``entries`` the lists it stands in, outermost first;
    ``home`` the one that is its stack.
    """

    path: str
    shape: Shape
    names: tuple[str, ...]
    entries: tuple[_Entry, ...]
    home: _Entry | None = None
    target: str = ""

    @property
    def role(self) -> str:
        """Its name in settings: its role in its stack or the outermost list, else its path."""
        entry = self.home or next(iter(self.entries), None)
        return self.path if entry is None else entry.known_as

    @property
    def target_key(self) -> object:
        return self.path if self.home is None else self.home.key

    def answers_to(self) -> set[str]:
        """Everything that a pattern may name it by."""
        return {self.path, *(entry.known_as for entry in self.entries)}


def module_lora_spec(  # every one is a setting of its own
    root: nn.Module,
    rules: CheckpointRules = AS_BUILT,
    *,
    slots: int,
    max_rank: int,
    cpu_capacity: int,
    dtype: str,
    parts: Sequence[str] = ("",),
    rows: Mapping[str, RowGrouping] | None = None,
    names: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
) -> LoraSpec:
    """The spec of one stage of the model ``root``, the modules at and under the paths ``parts``.

    It has a target for each role of each stack and for each module outside, in the modules' order,
    then the embedding's and the head's. Modules may be on the meta device. ``rules`` say how files
    spell their names.

    Patterns are regular expressions of a module's path, or of its role, its path within an entry of
    a list it stands in. ``rows``: pattern -> the rows that the linear sees, if not
    every token. ``names``: role -> the target's name in settings, by default the role; names that
    clash are widened by their stacks. ``exclude``: no adapter may change it. What a module declares
    in ``lora_unservable`` is left out with its reason.

    Raises:
        ConfigError: a pattern or a name matches nothing, two targets have one name, or
            ``lora_unservable`` names a child that does not exist.
    """
    for part in parts:
        root.get_submodule(part)
    declared = declared_unservable(root)
    declared = {path: why for path, why in declared.items() if _is_in(path, parts)}
    found, refused = _found(root, parts, declared)
    patterns = _Patterns()
    excluded = patterns.of("exclude", exclude)
    kept = [module for module in found if not excluded.hit(module)]
    refused += [Unservable(n, EXCLUDED) for m in found if excluded.hit(m) for n in m.names]
    refused += [Unservable(path, reason) for path, reason in declared.items()]
    for module in kept:
        _regroup(module, patterns, rows or {})
    patterns.check_used()
    _settle_homes(kept)
    _name(kept, names or {})
    kept.sort(key=lambda module: module.shape.parallel.is_vocab)
    firsts: dict[str, _Module] = {}
    for module in kept:
        firsts.setdefault(module.target, module)
    return LoraSpec(
        targets=tuple(_target(module) for module in firsts.values()),
        slots=slots,
        max_rank=max_rank,
        cpu_capacity=cpu_capacity,
        dtype=dtype,
        sites=tuple(
            LoraSite(m.path, m.target, 0 if m.home is None else m.home.number) for m in kept
        ),
        unservable=tuple(dict.fromkeys(refused)),
        module_map=rules,
    )


def _found(
    root: nn.Module, parts: Sequence[str], declared: Mapping[str, str]
) -> tuple[list[_Module], list[Unservable]]:
    """The modules that adapters may change, in order, and those of such kinds that they may not."""
    modules: list[_Module] = []
    refused: list[Unservable] = []
    lists = _numbered_lists(root)
    for path, module in root.named_modules():
        family = family_of(module) if _is_in(path, parts) else None
        if family is None:
            continue
        shape = family.describe(module) if isinstance(family, Family) else family
        why = reason_for(path, declared)
        if isinstance(shape, str):
            refused.append(Unservable(path, why or shape))
            continue
        names = _names(path, shape)
        if why is not None:
            refused += [Unservable(name, why) for name in names]
            continue
        entries = () if shape.parallel.is_vocab else tuple(_entries(path, names, lists))
        modules.append(_Module(path, shape, names, entries))
    return modules, refused


def _is_in(path: str, parts: Sequence[str]) -> bool:
    return any(starts_with(path, part) for part in parts)


def _names(path: str, shape: Shape) -> tuple[str, ...]:
    """The names of the module and of its slices."""
    parent, _, own = path.rpartition(".")
    return (path, *(join_words((parent, part.name or own)) for part in shape.slices))


def _numbered_lists(root: nn.Module) -> dict[str, int]:
    """Path -> number of entries, of every list whose entries are numbered."""
    return {
        path: len(module)
        for path, module in root.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and [name for name, _ in module.named_children()] == [str(i) for i in range(len(module))]
    }


def _entries(path: str, names: tuple[str, ...], lists: Mapping[str, int]) -> Iterator[_Entry]:
    """The lists that the module and its slices stand in, outermost first."""
    for stack, size in lists.items():
        if not stack or path == stack or not starts_with(path, stack):
            continue
        number, _, role = rest_of(path, stack).partition(".")
        entry = join_words((stack, number))
        if all(starts_with(name, entry) for name in names):
            within = tuple(rest_of(name, entry) for name in names)
            yield _Entry(stack, int(number), size, role, within)


def _settle_homes(modules: Sequence[_Module]) -> None:
    """Choose each module's stack.

    It is the outermost list whose every entry has such a module, alike, of those that no list
    further out took. An expert's is the list of experts that one router serves.

    Raises:
        ConfigError: some experts of a list cannot be adapted and others can.
    """
    stacks: dict[str, dict[object, list[tuple[_Module, _Entry]]]] = {}
    for module in modules:
        for entry in module.entries[-1:] if module.shape.routed else module.entries:
            roles = stacks.setdefault(entry.stack, {})
            roles.setdefault(entry.key, []).append((module, entry))
    for stack in sorted(stacks, key=lambda path: path.count(".")):
        for standing in stacks[stack].values():
            left = [(module, entry) for module, entry in standing if module.home is None]
            alike = len({module.shape for module, _ in left}) == 1
            if alike and len(left) == left[0][1].size:
                for module, entry in left:
                    module.home = entry
    for module in modules:
        if module.shape.routed and module.home is None:
            raise ConfigError(
                f"{module.path} would be adapted, and not every other expert: exclude all or none"
            )


def _regroup(module: _Module, patterns: _Patterns, rows: Mapping[str, RowGrouping]) -> None:
    for pattern, grouping in rows.items():
        if module.shape.parallel.is_linear and patterns.of("rows", [pattern]).hit(module):
            module.shape = replace(module.shape, rows=grouping)
            return


def _name(modules: Sequence[_Module], names: Mapping[str, str]) -> None:
    """Give each target a name of its own.

    Raises:
        ConfigError: two outside every list have one name, or a name is for nobody.
    """
    targets = {module.target_key: module for module in modules}
    for role in names:
        if all(module.role != role for module in modules):
            raise ConfigError(
                f"names has {role!r}, which is the role of no module that adapters change"
            )
    given = {key: names.get(module.role, module.role) for key, module in targets.items()}
    widened: set[object] = set()
    while doubles := [name for name, times in Counter(given.values()).items() if times > 1]:
        clashing = [key for key, name in given.items() if name in doubles]
        wider = [key for key in clashing if targets[key].entries and key not in widened]
        if not wider:
            both = " and ".join(targets[key].path for key in clashing if given[key] == doubles[0])
            raise ConfigError(f"{both} are both called {doubles[0]!r}: name one of them otherwise")
        for key in wider:
            given[key] = _widened(given[key], targets[key])
        widened.update(wider)
    for module in modules:
        module.target = given[module.target_key]


def _widened(name: str, module: _Module) -> str:
    """The name with its module's stack, or with its entry of the outermost list."""
    if module.home is not None:
        return join_words((module.home.stack, name))
    outermost = module.entries[0]
    # Entries that are the modules themselves are called as their list is.
    own = name if outermost.role else ""
    return join_words((outermost.stack, str(outermost.number), own))


def _target(module: _Module) -> LoraTarget:
    home, shape = module.home, module.shape
    own, *slices = module.names if home is None else home.names
    parents = {name.rpartition(".")[0] for name in slices}
    assert len(parents) == 1, f"the slices of {module.path} lie apart: {slices}"
    return LoraTarget(
        name=module.target,
        stack="" if home is None else home.stack,
        num_layers=1 if home is None else home.size,
        parent=parents.pop(),
        in_features=shape.in_features,
        out_slices=tuple(
            replace(part, name=name.rpartition(".")[2])
            for part, name in zip(shape.slices, slices, strict=True)
        ),
        parallel=shape.parallel,
        in_units=shape.in_features,
        row_grouping=shape.rows,
        tied=shape.tied,
        conv=shape.conv,
        routed=shape.routed,
        path=None if own == module.target else own,
    )


@dataclass(slots=True)
class _Pattern:
    """Regular expressions of one setting, and which of them matched."""

    setting: str
    rules: list[re.Pattern[str]]
    used: set[str] = field(default_factory=set)

    def hit(self, module: _Module) -> bool:
        names = module.answers_to()
        hits = [rule.pattern for rule in self.rules if any(map(rule.fullmatch, names))]
        self.used.update(hits)
        return bool(hits)


@dataclass(slots=True)
class _Patterns:
    """Every pattern of a walk."""

    _all: dict[tuple[str, tuple[str, ...]], _Pattern] = field(default_factory=dict)

    def of(self, setting: str, patterns: Iterable[str]) -> _Pattern:
        texts = tuple(patterns)
        made = _Pattern(setting, [re.compile(text) for text in texts])
        return self._all.setdefault((setting, texts), made)

    def check_used(self) -> None:
        for group in self._all.values():
            for rule in group.rules:
                if rule.pattern not in group.used:
                    raise ConfigError(
                        f"{group.setting} pattern {rule.pattern!r} matches no module that adapters "
                        "change"
                    )
