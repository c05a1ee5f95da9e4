"""A spec made of an adapter's own keys, for files converted without their base model.

No torch.

Kohya and diffusers name the modules of a decoder in ways that can be undone without knowing the
model, as long as they are the usual ones. Their sizes are the factors' own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.distributed.shard import OutSlice
from mstar_tp.lora.format.adapter_files import Headers
from mstar_tp.lora.format.assemble import parse_keys
from mstar_tp.lora.format.keys import Key, Role, Spelling
from mstar_tp.lora.format.peft_values import MAX_RANK
from mstar_tp.lora.format.placing import core_name, kohya_word
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget

_STACK = "model.layers"
_LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
_PATHS = {f"{a}_{b}": f"{a}.{b}" for a, leaves in _LINEARS.items() for b in leaves}
_WORD = re.compile(rf"layers_([0-9]{{1,6}})_({'|'.join(_PATHS)})")
_DOTTED = re.compile(r"layers\.([0-9]{1,6})\.(.+)")


@dataclass(slots=True)
class _Module:
    """A module as its factors describe it."""

    layers: int = 0
    size_in: int = 1
    size_out: int = 1


def decoder_spec(headers: Headers) -> LoraSpec:
    """Every module that the keys name, as linears of a decoder.

    Raises:
        AdapterError: a key cannot be read, or names no usual module of a decoder.
    """
    found: dict[str, _Module] = {}
    for key in parse_keys(headers, Problems()):
        layer, path = _place(headers.where, key)
        module = found.setdefault(path, _Module())
        module.layers = max(module.layers, layer + 1)
        shape = headers.tensors[key.text].info.shape
        if key.role not in (Role.A, Role.B):
            continue
        if len(shape) != 2:
            raise AdapterError(
                f"{headers.where}: {key.text} is {list(shape)}, wanted the two dims of a linear's "
                "factor"
            )
        if key.role is Role.A:
            module.size_in = shape[1]
        else:
            module.size_out = shape[0]
    layers = max(module.layers for module in found.values())
    targets = tuple(_target(path, module, layers) for path, module in found.items())
    return LoraSpec(targets=targets, slots=1, max_rank=MAX_RANK, cpu_capacity=1, dtype="float32")


def _place(where: str, key: Key) -> tuple[int, str]:
    """(layer, path within it), or (-1, path) of a module outside the layers."""
    if key.spelling is Spelling.KOHYA:
        name = kohya_word(key.module)
        match = _WORD.fullmatch(name)
        path = None if match is None else _PATHS[match[2]]
    else:
        name = core_name(key.module)
        match = _DOTTED.fullmatch(name)
        path = None if match is None else match[2]
    if match is not None and path is not None:
        return int(match[1]), path
    if name == "lm_head":
        return -1, name
    raise AdapterError(
        f"{where}: {key.text}: names no usual module of a decoder: give --model DIR, the model "
        "that the adapter is for"
    )


def _target(path: str, module: _Module, layers: int) -> LoraTarget:
    parent, _, leaf = path.rpartition(".")
    stacked = module.layers > 0
    return LoraTarget(
        name=path,
        stack=_STACK if stacked else "",
        num_layers=layers if stacked else 1,
        parent=parent,
        in_features=module.size_in,
        out_slices=(OutSlice(name=leaf, out_features=module.size_out, units=1),),
        parallel=LoraParallel.COLUMN,
        in_units=1,
    )
