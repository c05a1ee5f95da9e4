"""The spec that an adapter's own tensors describe, for a file without its base model.

No torch.

Every module that the file names is taken for a module of the model, of the size that its tensors
have. So all that the file says by itself is validated by the parser that serves (settings, pairs,
ranks, keys), and nothing that only the model knows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.lora.format.adapter_files import Headers
from mstar_tp.lora.format.keys import Key, Role, Spelling, parse_key
from mstar_tp.lora.format.placing import core_name, kohya_word
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.tools.check.file_alone_experts import expert_targets

_ANY_SIZE = 1 << 31
"""Ids of a vocabulary whose size nothing says."""
_HEADS = ("lm_head", "output", "embed_out")
_WHOLE = (Role.SAVED, Role.PLAIN, Role.BASE)


@dataclass(slots=True)
class _Seen:
    """The sizes of one module that its tensors tell."""

    stack: str
    path: str
    layer: int
    size_in: int = 0
    size_out: int = 0
    conv: tuple[int, ...] = ()
    roles: set[Role] = field(default_factory=set)

    @property
    def parallel(self) -> LoraParallel:
        leaf = self.path.rpartition(".")[2]
        whole = self.roles <= set(_WHOLE)
        if self.roles & {Role.EMBEDDING_A, Role.EMBEDDING_B, Role.TOKENS}:
            return LoraParallel.VOCAB_IN
        if whole and self.size_in and "embed" in leaf:
            return LoraParallel.VOCAB_IN
        if whole and self.size_in == 0:
            return LoraParallel.NORM
        return LoraParallel.VOCAB_OUT if leaf in _HEADS else LoraParallel.COLUMN

    @property
    def shape(self) -> tuple[LoraParallel, int, int, tuple[int, ...]]:
        return self.parallel, self.size_in, self.size_out, self.conv


def spec_alone(headers: Headers, limits: LoraSpec) -> LoraSpec:
    """``limits`` with a module for each name in the file.

    A layer whose size is not its role's most frequent one stands for itself.
    """
    experts, stacked = expert_targets(headers)
    seen: dict[tuple[str, str, int], _Seen] = {}
    for text, tensor in headers.tensors.items():
        key = parse_key(text)
        place = None if key is None or key.role is Role.ALPHA else _place(key)
        if key is not None and place is not None and key.module not in stacked:
            _note(
                seen.setdefault(place, _Seen(place[0], place[1], place[2])), key, tensor.info.shape
            )
    layers: dict[str, int] = {}
    roles: dict[tuple[str, str], list[_Seen]] = {}
    for module in seen.values():
        layers[module.stack] = max(layers.get(module.stack, 0), module.layer + 1)
        roles.setdefault((module.stack, module.path), []).append(module)
    targets: dict[str, LoraTarget] = {}
    for (stack, path), modules in roles.items():
        ((common, _),) = Counter(module.shape for module in modules).most_common(1)
        for module in modules:
            alone = stack and module.shape != common
            name = f"{stack}.{module.layer}.{path}" if alone else path
            home = "" if alone else stack
            targets[f"{home} {name}"] = _target(module, home, name, layers[stack] if home else 1)
    return replace(limits, targets=(*targets.values(), *experts))


def _place(key: Key) -> tuple[str, str, int] | None:
    """(stack, path, layer), or None for a name that is no module's."""
    if key.spelling is Spelling.KOHYA:
        match = re.fullmatch(r"(.+?)_(0|[1-9][0-9]{0,8})_(.+)", kohya_word(key.module))
        return None if match is None else (match[1], match[3], int(match[2]))
    core = core_name(key.module)
    match = re.fullmatch(r"(.+?)\.([0-9]+)\.(.+)", core)
    if match is not None:
        # Some other spelling of a number: the parser refuses it.
        layer = int(match[2]) if re.fullmatch(r"0|[1-9][0-9]{0,8}", match[2]) else 0
        return match[1], match[3], layer
    return ("", core, 0) if core else None


def _note(module: _Seen, key: Key, shape: tuple[int, ...]) -> None:
    module.roles.add(key.role)
    if len(shape) > 2:
        if key.role is Role.A:
            module.conv = shape[1:]
        shape = (shape[0], math.prod(shape[1:]))
    if len(shape) == 1 and key.role in _WHOLE:
        module.size_out = module.size_out or shape[0]
    if len(shape) != 2:
        return
    if key.role in (Role.A, Role.EMBEDDING_A):
        module.size_in = shape[1]
    elif key.role in (Role.B, Role.EMBEDDING_B):
        module.size_out = shape[0]
    elif key.role is Role.TOKENS:
        module.size_out, module.size_in = shape[1], module.size_in or _ANY_SIZE
    elif "embed" in module.path.rpartition(".")[2] and not module.roles - set(_WHOLE):
        module.size_in, module.size_out = shape
    else:
        module.size_out, module.size_in = shape


def _target(module: _Seen, stack: str, name: str, num_layers: int) -> LoraTarget:
    parent, _, leaf = name.rpartition(".")
    kind = module.parallel
    size_in = module.size_in or 1
    size_out = module.size_out or 1
    if kind is LoraParallel.NORM:
        size_in = size_out
    return LoraTarget(
        name=f"{stack}.*.{name}" if stack else name,
        path=name,
        stack=stack,
        num_layers=num_layers,
        parent=parent,
        in_features=size_in,
        out_slices=(OutSlice(name=leaf, out_features=size_out, units=1),),
        parallel=kind,
        in_units=1,
        conv=module.conv if kind is LoraParallel.COLUMN else (),
        row_grouping=RowGrouping.SAMPLED if kind is LoraParallel.VOCAB_OUT else RowGrouping.TOKENS,
    )
