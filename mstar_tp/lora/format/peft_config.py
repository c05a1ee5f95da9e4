"""adapter_config.json: what it says about the delta, or why the adapter cannot be served exactly.

Every key is known here: one that changes the maths is honoured or refused by name, one without
effect on inference is passed over, and one nobody knows is refused unless it is plainly off. No
torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.common.strict_json import show as _shown
from mstar_tp.lora.format import peft_values as values
from mstar_tp.lora.format.config_file import read_json
from mstar_tp.lora.format.patterns import Endings, PatternTable, matches

CONFIG_NAME = "adapter_config.json"

T = TypeVar("T")

_WITHOUT_EFFECT = frozenset(
    """
    task_type peft_version auto_mapping base_model_name_or_path revision inference_mode
    lora_dropout
    loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core
    qalora_group_size ephemeral_gpu_offload runtime_config velora_config
    """.split()
)
"""Settings of training alone."""

_READ_HERE = frozenset(
    """
    peft_type r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights target_modules
    exclude_modules layers_to_transform layers_pattern lora_bias modules_to_save
    trainable_token_indices ensure_weight_tying fan_in_fan_out bias target_parameters
    """.split()
)

_MUST_BE_OFF = {
    "use_dora": "DoRA rescales the base weight's rows, which a low-rank delta cannot do: merge the "
    "adapter into the base model (PEFT: merge_and_unload) and serve the result as a base",
    "use_qalora": "QALoRA pools the input over groups",
    "use_bdlora": "block-diagonal factors are not plain LoRA",
    "alora_invocation_tokens": "the adapter would act from those tokens on only, not on the whole "
    "prompt",
    "layer_replication": "it changes the base model's layers",
    "arrow_config": "it routes between several adapters",
    "kasa_config": "it changes the base model's weights and puts a diagonal between the factors",
    "monteclora_config": "it samples its factors",
}
_PERHAPS_MERGED = _MUST_BE_OFF.keys() - {"use_dora", "alora_invocation_tokens"}

_NO_MODULES: frozenset[str] | str = frozenset()
_ACT_EMPTY = frozenset(
    """
    use_bdlora alora_invocation_tokens arrow_config kasa_config monteclora_config
    """.split()
)

_BASE_KEEPING_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_CONVERTIBLE_INITS = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")
_CONVERT = (
    "in PEFT, save the adapter before training too (save_pretrained('INITIAL') with "
    "init_lora_weights set to true in its config), then the trained one with "
    "save_pretrained(OUT, path_initial_model_for_weight_conversion='INITIAL'), and serve OUT"
)
_MERGE_IF_ABLE = (
    "where PEFT can merge this one (merge_and_unload), serve the merged model as a base"
)
_MERGE = (
    "merge the adapter into the base model it was trained on (PEFT: merge_and_unload) and serve "
    "the result as a base"
)


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The settings of a PEFT LoRA config that change the delta. ``where`` names the file in errors.

    ``notes`` are sentences about settings that were passed over.
    """

    where: str
    r: int
    alpha: float
    rslora: bool = False
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    lora_bias: bool = False
    target_modules: frozenset[str] | str | None = None
    exclude_modules: frozenset[str] | str = frozenset()
    layers: frozenset[int] | None = None
    """``layers_to_transform``; None for all."""
    layers_patterns: tuple[str, ...] = ()
    """``layers_pattern``: names that a stack of layers may have; none for any."""
    modules_to_save: tuple[str, ...] = ()
    token_ids: Mapping[str, tuple[int, ...]]
    """``trainable_token_indices`` by the embedding's name."""
    ensure_weight_tying: bool = False
    target_parameters: frozenset[str] = frozenset()
    """Parameters that are adapted as they are: stacked experts, or a linear's weight."""
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def _saved(self) -> Endings:
        return Endings(self.modules_to_save)

    @functools.cached_property
    def _token_modules(self) -> Endings:
        return Endings(self.token_ids)

    def rank_of(self, names: Sequence[str]) -> int:
        """The rank of the module that PEFT may name any of ``names``."""
        return _first(self.rank_pattern, names, self.r)

    def scaling_of(self, names: Sequence[str], lora_rank: int) -> float:
        """The factor of B @ A: alpha / r, or alpha / sqrt(r) when rank-stabilised."""
        alpha = _first(self.alpha_pattern, names, self.alpha)
        return alpha / math.sqrt(lora_rank) if self.rslora else alpha / lora_rank

    def saves(self, names: Sequence[str]) -> bool:
        """Tell whether ``modules_to_save`` names the module or, to PEFT, any ending of it."""
        return self._saved.first(names) is not None

    def adapts_parameter(self, names: Sequence[str]) -> bool:
        """Tell whether ``target_parameters`` names what PEFT may call any of ``names``."""
        return any(tail in self.target_parameters for name in names for tail in _tails(name))

    def parameters_without(self, names: Collection[str]) -> list[str]:
        """The entries of ``target_parameters`` that none of ``names`` answers to."""
        return sorted(self.target_parameters - {tail for name in names for tail in _tails(name)})

    def tokens_of(self, names: Sequence[str]) -> tuple[int, ...] | None:
        """``trainable_token_indices`` of the module, if there are any."""
        wanted = self._token_modules.first(names)
        return None if wanted is None else self.token_ids[wanted]

    def why_excluded(self, names: Sequence[str], name: str) -> str | None:
        """The setting by which PEFT would leave a module alone, or None.

        ``name`` is the one the model has for it.
        """
        # PEFT asks for the layer only where target_modules names the module by an ending.
        exact = isinstance(self.target_modules, frozenset) and any(
            text in self.target_modules for text in names
        )
        if self.layers is not None and not exact:
            layer = _layer_of(name, self.layers_patterns)
            if layer is None and self.layers_patterns:
                return f"layers_pattern names no stack of layers it is in ({name})"
            if layer not in self.layers:
                what = "modules outside layers" if layer is None else f"layer {layer}"
                return f"layers_to_transform does not name {what}"
        if isinstance(self.exclude_modules, str):
            hit = any(matches(self.exclude_modules, text) for text in names)
        else:
            hit = any(tail in self.exclude_modules for text in names for tail in _tails(text))
        return "exclude_modules names it" if hit else None

    def targets(self, names: Sequence[str]) -> bool:
        """False when ``target_modules`` is a list, not empty, that leaves the module out."""
        if not isinstance(self.target_modules, frozenset) or not self.target_modules:
            return True
        return any(tail in self.target_modules for name in names for tail in _tails(name))

    def targets_without(self, names: Collection[str]) -> list[str]:
        """The entries of ``target_modules`` (a list) that none of ``names`` answers to."""
        if not isinstance(self.target_modules, frozenset):
            return []
        return sorted(self.target_modules - {tail for name in names for tail in _tails(name)})

    def saves_without(self, names: Collection[str]) -> list[str]:
        """The saved modules that are none of ``names``.

        ``modules_to_save`` or ``trainable_token_indices`` names them.
        """
        saved = [f"{entry} (modules_to_save)" for entry in self._saved.without(names)]
        tokens = self._token_modules.without(names)
        return [*saved, *(f"{entry} (trainable_token_indices)" for entry in tokens)]


def _layer_of(name: str, patterns: Sequence[str]) -> int | None:
    """The layer that PEFT reads from a module's name.

    It is the first number after a stack's name, which is any word, or the first of ``patterns``
    that any number follows.
    """
    pairs = itertools.pairwise(name.split("."))
    numbers = [(stack, int(word)) for stack, word in pairs if word.isdecimal()]
    wanted = [n for p in patterns for stack, n in numbers if stack == p]
    found = wanted if patterns else [n for _, n in numbers]
    return found[0] if found else None


def _tails(name: str) -> list[str]:
    """The name and every dotted end of it."""
    return [name, *(name[i + 1 :] for i, char in enumerate(name) if char == ".")]


def _first(table: PatternTable[T], names: Sequence[str], default: T) -> T:
    found = (table.get(name) for name in names)
    return next((value for value in found if value is not None), default)


def read_peft_config(folder: Path, problems: Problems) -> PeftConfig | None:
    """The adapter's config; None where ``problems`` were found in its settings.

    Raises:
        AdapterError: it is absent, malformed, or asks for what cannot be served exactly; the key is
            named.
    """
    path = folder / CONFIG_NAME
    try:
        tree = read_json(path)
    except FileNotFoundError:
        raise AdapterError(
            f"{folder}: has no {CONFIG_NAME}: wanted a PEFT adapter folder with {CONFIG_NAME} and "
            "adapter_model.safetensors"
        ) from None
    return parse_peft_config(tree, problems, where=str(path))


def parse_peft_config(
    tree: Mapping[str, Any], problems: Problems, *, where: str
) -> PeftConfig | None:
    """Parse the config from its JSON, with the results and errors of ``read_peft_config``."""
    kind = tree.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{where}: peft_type is {values.got(kind)}; only LORA adapters can be served: "
            f"{_MERGE_IF_ABLE}"
        )
    before, get = len(problems), tree.get
    for key, value in tree.items():
        with problems:
            _check_key(where, key, value)
    with problems:
        _check_bias(where, get("bias"))
    with problems:
        _check_init(where, get("init_lora_weights", True))
    ids = problems.attempt({}, values.token_ids, where, get("trainable_token_indices"))

    def read(otherwise: T, parse: Callable[[str, str, Any], T], key: str) -> T:
        return problems.attempt(otherwise, parse, where, key, get(key))

    def patterns(key: str, parse: Callable[[str, str, Any], T]) -> PatternTable[T]:
        return problems.attempt(PatternTable({}), values.patterns, where, key, get(key), parse)

    config = PeftConfig(
        where=where,
        r=read(1, values.count, "r"),
        alpha=read(1.0, values.number, "lora_alpha"),
        rslora=read(False, values.flag, "use_rslora"),
        rank_pattern=patterns("rank_pattern", values.count),
        alpha_pattern=patterns("alpha_pattern", values.number),
        lora_bias=read(False, values.flag, "lora_bias"),
        target_modules=read(None, values.modules, "target_modules"),
        exclude_modules=read(_NO_MODULES, values.excluded, "exclude_modules"),
        layers=read(None, values.layers, "layers_to_transform"),
        layers_patterns=problems.attempt((), values.layers_patterns, where, tree),
        modules_to_save=read((), values.strings, "modules_to_save"),
        token_ids=ids,
        ensure_weight_tying=read(False, values.flag, "ensure_weight_tying"),
        target_parameters=read(frozenset(), values.parameters, "target_parameters"),
        notes=problems.attempt((), _fan_note, where, get("fan_in_fan_out")),
    )
    return config if len(problems) == before else None


def _check_key(where: str, key: str, value: Any) -> None:
    if key in _WITHOUT_EFFECT or key in _READ_HERE or _is_off(key, value):
        return
    if key in _MUST_BE_OFF:
        raise AdapterError(
            f"{where}: {key} is {_shown(value)}, which cannot be served: {_MUST_BE_OFF[key]}"
            + (f": {_MERGE_IF_ABLE}" if key in _PERHAPS_MERGED else "")
        )
    raise AdapterError(
        f"{where}: {_shown(key)} is {_shown(value)}, a setting this version does not know: remove "
        "it if it has no effect on inference"
    )


def _is_off(key: str, value: Any) -> bool:
    # An empty one of these is a setting of defaults to PEFT, and acts.
    if key in _ACT_EMPTY:
        return value is None or value is False
    return value is None or value is False or value in ([], {})


def _check_bias(where: str, value: Any) -> None:
    if value not in (None, "none"):
        raise AdapterError(
            f"{where}: bias is {_shown(value)}, so biases of the base model were trained; only "
            f"'none' can be served: {_MERGE}"
        )


def _check_init(where: str, value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, str):
        raise AdapterError(
            f"{where}: init_lora_weights is {_shown(value)}, wanted true, false or a name"
        )
    name = value.lower()
    if name in _BASE_KEEPING_INITS:
        return
    known = _CONVERTIBLE_INITS.fullmatch(name) or name == "loftq"
    does = "changes" if known else "is not known here and may change"
    how = _CONVERT if _CONVERTIBLE_INITS.fullmatch(name) else _MERGE
    raise AdapterError(
        f"{where}: init_lora_weights is {_shown(value)}, which {does} the base model at training: "
        f"{how}; an adapter that was converted already has it set to true"
    )


def _fan_note(where: str, value: Any) -> tuple[str, ...]:
    if not values.flag(where, "fan_in_fan_out", value):
        return ()
    return (
        "fan_in_fan_out is true, but the served linears keep [out, in]: taken as false, "
        "as PEFT takes it",
    )
