"""Factors of stacked experts (PEFT's ``target_parameters``) -> each expert's own. No torch.

PEFT wraps the module that holds the stacked parameters once for each that is adapted, the
innermost around the first of them, so a key says only how deep it lies: ``experts.lora_A``, and
inside it ``experts.base_layer.lora_A``. Which parameter that is follows from the setting. Of E
experts and rank r, A is [E * r, in] with an expert's rows side by side, and B is [out, r * E] with
an expert's columns E apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.adapter_files import StoredTensor
from mstar_tp.lora.format.keys import NESTED, Key, Role, without_nesting
from mstar_tp.lora.format.parts import FLOAT_DTYPES, Part
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig
from mstar_tp.lora.format.placing import ModulePlace
from mstar_tp.lora.spec import LoraTarget


def expert_parts(
    where: str,
    key: Key,
    tensor: StoredTensor,
    experts: Sequence[LoraTarget],
    config: PeftConfig | None,
    max_rank: int,
) -> list[Part]:
    """Each expert's part of one factor.

    ``experts`` are the linears of the layer's experts, in the order of their parameters.

    Raises:
        AdapterError: the setting does not say which parameter it is of, or it does not fit.
    """
    if key.role not in (Role.A, Role.B):
        raise AdapterError(
            f"{where}: {key.text}: of stacked experts only lora_A and lora_B can be served"
        )
    holder = without_nesting(key.module).removeprefix("base_model.model.")
    target, name = _parameter(where, key, holder, experts, config)
    assert config is not None, "a setting named the parameter"
    lora_rank, count = config.rank_of((name,)), target.num_layers
    if lora_rank > max_rank:
        raise AdapterError(
            f"{where}: {key.text}: {name} has rank {lora_rank}, wanted at most {max_rank}: raise "
            "--max-lora-rank or drop the adapter"
        )
    major = key.role is Role.A
    wanted = (
        (count * lora_rank, target.in_features)
        if major
        else (target.out_features, lora_rank * count)
    )
    if tensor.info.shape != wanted or tensor.info.dtype not in FLOAT_DTYPES:
        raise AdapterError(
            f"{where}: {key.text}: {name} {key.role.value} is {tensor.info.dtype} "
            f"{list(tensor.info.shape)}, wanted {list(wanted)} of {', '.join(FLOAT_DTYPES)} "
            f"({count} experts of rank {lora_rank})"
        )
    slices = tuple(range(len(target.out_slices)))
    path = target.own_path if len(slices) > 1 else target.path_of(0)
    return [
        Part(
            key,
            tensor.of_expert(expert, count, major=major),
            ModulePlace(target, expert, slices, target.named(expert, path)),
            parameters=(name,),
        )
        for expert in range(count)
    ]


def _parameter(
    where: str,
    key: Key,
    holder: str,
    experts: Sequence[LoraTarget],
    config: PeftConfig | None,
) -> tuple[LoraTarget, str]:
    """The linears whose stacked parameter the key adapts, and what PEFT calls it."""
    named = [(target, f"{holder}.{target.own_path}") for target in experts]
    adapted = [
        entry for entry in named if config is not None and config.adapts_parameter(entry[1:])
    ]
    depth = key.module.count(NESTED)
    if depth >= len(adapted):
        known = " or ".join(name for _, name in named)
        raise AdapterError(
            f"{where}: {key.text}: is a factor of stacked experts, and target_parameters in "
            f"{CONFIG_NAME} does not say of which parameter: wanted {known}"
        )
    return adapted[len(adapted) - 1 - depth]
