"""The stacked experts that a file's own factors are of, where no base model is known. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from mstar_tp.common.problems import Problems
from mstar_tp.distributed.shard import OutSlice
from mstar_tp.lora.format.adapter_files import Headers
from mstar_tp.lora.format.keys import NESTED, Role, parse_key, without_nesting
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig, read_peft_config
from mstar_tp.lora.format.placing import core_name
from mstar_tp.lora.spec import LoraParallel, LoraTarget

_ORDER = ("gate_up_proj", "down_proj")
"""The order in which models have their stacked parameters, as far as is known."""
_MANY = 1000

_Shapes = dict[Role, tuple[int, ...]]


def expert_targets(headers: Headers) -> tuple[list[LoraTarget], frozenset[str]]:
    """A target for each stacked parameter that the file adapts, and the modules of its keys.

    The number of experts follows from a factor's size and its rank.
    """
    config = _config(headers)
    if config is None:
        return [], frozenset()
    holders: dict[str, dict[str, _Shapes]] = {}
    for text, tensor in headers.tensors.items():
        key = parse_key(text)
        if key is not None and key.role in (Role.A, Role.B) and len(tensor.info.shape) == 2:
            modules = holders.setdefault(without_nesting(key.module), {})
            modules.setdefault(key.module, {})[key.role] = tensor.info.shape
    targets: list[LoraTarget] = []
    taken: set[str] = set()
    for holder, modules in holders.items():
        parameters = _parameters(config, holder)
        if parameters and len(parameters) == len(modules):
            by_depth = sorted(modules, key=lambda module: -module.count(NESTED))
            for parameter, module in zip(parameters, by_depth, strict=True):
                targets += _target(config, holder, parameter, modules[module])
            taken.update(modules)
    return targets, frozenset(taken)


def _config(headers: Headers) -> PeftConfig | None:
    if headers.folder is None or not (headers.folder / CONFIG_NAME).exists():
        return None
    problems = Problems(_MANY)  # whoever asked hears of them from the parser
    config: PeftConfig | None = None
    with problems:
        config = read_peft_config(headers.folder, problems)
    return config


def _parameters(config: PeftConfig, holder: str) -> list[str]:
    """The stacked parameters of ``holder`` that the setting names, in their order."""
    leaves = {entry.rpartition(".")[2] for entry in config.target_parameters} - {"weight"}
    mine = [leaf for leaf in leaves if config.adapts_parameter((f"{holder}.{leaf}",))]
    known = {leaf: number for number, leaf in enumerate(_ORDER)}
    return sorted(mine, key=lambda leaf: (known.get(leaf, len(known)), leaf))


def _target(
    config: PeftConfig, holder: str, parameter: str, shapes: Mapping[Role, tuple[int, ...]]
) -> list[LoraTarget]:
    if Role.A not in shapes or Role.B not in shapes:
        return []
    rows, size_in = shapes[Role.A]
    name = f"{holder.removeprefix('base_model.model.')}.{parameter}"
    return [
        LoraTarget(
            name=f"{core_name(holder)}.{parameter}",
            stack=core_name(holder),
            num_layers=max(1, rows // config.rank_of((name,))),
            parent="",
            in_features=size_in,
            out_slices=(OutSlice(name=parameter, out_features=shapes[Role.B][0], units=1),),
            parallel=LoraParallel.COLUMN,
            in_units=size_in,
            routed=True,
            path=parameter,
        )
    ]
