"""adapter_config.json: what it says about the delta, or why the adapter cannot be served exactly.

Every key is known here: one that changes the maths is honoured or refused by name, one without
effect on inference is passed over, and one nobody knows is refused unless it is plainly off. No
torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_tp.errors import AdapterError

CONFIG_NAME = "adapter_config.json"

_WITHOUT_EFFECT = frozenset(
    """
    task_type peft_version auto_mapping base_model_name_or_path revision inference_mode
    target_modules exclude_modules layers_to_transform layers_pattern lora_dropout lora_bias
    loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core
    qalora_group_size ensure_weight_tying ephemeral_gpu_offload runtime_config
    """.split()
)
"""Settings of training, or of modules that the file's tensors name themselves."""

_MUST_BE_OFF = {
    "use_dora": "DoRA rescales the base weight's rows, which a low-rank delta cannot do",
    "use_qalora": "QALoRA pools the input over groups",
    "use_bdlora": "block-diagonal factors are not plain LoRA",
    "fan_in_fan_out": "the served linears keep their weight as [out, in]; set it to false if "
    "yours do too",
    "modules_to_save": "it replaces whole modules of the base model",
    "target_parameters": "it adapts bare parameters (stacked experts), which no linear owns",
    "alora_invocation_tokens": "the adapter would act from those tokens on only, not on the whole "
    "prompt",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it changes the base model's layers",
    "arrow_config": "it routes between several adapters",
    "kasa_config": "it changes the base model's weights",
}

_BASE_KEEPING_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What of a PEFT LoRA config changes the delta. ``where`` names the file in errors."""

    where: str
    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of the module that PEFT names ``module``."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def scaling_of(self, module: str) -> float:
        """What B @ A is multiplied with: alpha / r, or alpha / sqrt(r) when rank-stabilised."""
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_peft_config(folder: Path) -> PeftConfig:
    """The adapter's config.

    Raises:
        AdapterError: it is absent, malformed, or asks for what cannot be served exactly; the key is
            named.
    """
    path = folder / CONFIG_NAME
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(
            f"{folder}: has no {CONFIG_NAME}: wanted a PEFT adapter folder with {CONFIG_NAME} and "
            "adapter_model.safetensors"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(tree, dict):
        raise AdapterError(f"{path}: wanted a JSON object")
    return parse_peft_config(tree, where=str(path))


def parse_peft_config(tree: Mapping[str, Any], *, where: str) -> PeftConfig:
    """As ``read_peft_config``, from the parsed JSON."""
    kind = tree.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{where}: peft_type is {kind!r}; only LORA adapters can be served")
    for key, value in tree.items():
        _check_key(where, key, value)
    _check_init(where, tree.get("init_lora_weights", True))
    return PeftConfig(
        where=where,
        r=_count(where, "r", tree.get("r")),
        alpha=_number(where, "lora_alpha", tree.get("lora_alpha")),
        rslora=_flag(where, "use_rslora", tree.get("use_rslora")),
        rank_pattern=_pattern(where, "rank_pattern", tree.get("rank_pattern"), _count),
        alpha_pattern=_pattern(where, "alpha_pattern", tree.get("alpha_pattern"), _number),
    )


_READ_HERE = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
    }
)


def _check_key(where: str, key: str, value: Any) -> None:
    if key in _WITHOUT_EFFECT or key in _READ_HERE:
        return
    off = value is None or value is False or value in ([], {})
    if key == "bias":
        if value not in (None, "none"):
            raise AdapterError(
                f"{where}: bias is {value!r}, so biases of the base model were trained; only "
                "'none' can be served"
            )
    elif key in _MUST_BE_OFF:
        if not off:
            raise AdapterError(
                f"{where}: {key} is {_shown(value)}, which cannot be served: {_MUST_BE_OFF[key]}"
            )
    elif not off:
        raise AdapterError(
            f"{where}: {key} is {_shown(value)}, a setting this version does not know: remove it "
            "if it has no "
            "effect on inference"
        )


def _check_init(where: str, value: Any) -> None:
    if isinstance(value, bool) or (isinstance(value, str) and value in _BASE_KEEPING_INITS):
        return
    raise AdapterError(
        f"{where}: init_lora_weights is {value!r}, which changes the base model at training: "
        "convert the adapter "
        "to plain LoRA (PEFT: path_initial_model_for_weight_conversion) and set it to true"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _count(where: str, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{where}: {key} is {_got(value)}, wanted a whole number of at least 1")
    return value


def _number(where: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterError(f"{where}: {key} is {_got(value)}, wanted a number")
    return float(value)


def _flag(where: str, key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise AdapterError(f"{where}: {key} is {value!r}, wanted true or false")


def _got(value: Any) -> str:
    return "missing" if value is None else repr(value)


def _pattern(where: str, key: str, value: Any, parse: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(
            f"{where}: {key} is {_shown(value)}, wanted a mapping of module patterns"
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{where}: {key} {pattern!r} is no pattern: {error}") from None
    return {pattern: parse(where, f"{key}[{pattern!r}]", entry) for pattern, entry in value.items()}


def _pattern_key(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the module's name or a dotted tail of it, as PEFT looks them
    up.
    """
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return module
