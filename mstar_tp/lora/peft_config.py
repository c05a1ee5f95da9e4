"""adapter_config.json: what it says about the delta, or why the adapter cannot be served exactly.

Every key is known here: one that changes the maths is honoured or refused by name, one without
effect on inference is passed over, and one nobody knows is refused unless it is plainly off. No
torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_tp.errors import AdapterError

CONFIG_NAME = "adapter_config.json"

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 1000
MAX_PATTERN_CHARS = 200
MAX_REPEATS = 3
"""Repeats (``*``, ``+``, ``{m,n}``) in one pattern."""
MAX_GROUP_DEPTH = 8

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
        tree = json.loads(_read_small(path).decode("utf-8"))
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


def _read_small(path: Path) -> bytes:
    """The bytes of a regular file of at most ``MAX_CONFIG_BYTES``.

    Raises:
        AdapterError: it is none, or larger.
        OSError: it cannot be opened or read.
    """
    # O_NONBLOCK: opening a FIFO must not wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise AdapterError(f"{path}: is not a regular file")
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError(
            f"{path}: is larger than {MAX_CONFIG_BYTES} bytes, the most an adapter's config may be"
        )
    return data


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
    if len(value) > MAX_PATTERNS:
        raise AdapterError(
            f"{where}: {key} has {len(value)} patterns, wanted at most {MAX_PATTERNS}: let one "
            "pattern name several modules"
        )
    for pattern in value:
        try:
            _matcher(pattern)
        except _PatternError as error:
            raise AdapterError(
                f"{where}: {key} {_shown(pattern)} {error}: name the modules or the dotted ends of "
                "their names instead"
            ) from None
    return {pattern: parse(where, f"{key}[{pattern!r}]", entry) for pattern, entry in value.items()}


def _pattern_key(patterns: Iterable[str], module: str) -> str:
    """The first pattern that matches the module's name or a dotted tail of it, as PEFT looks them
    up.
    """
    starts = {0} | {index + 1 for index, char in enumerate(module) if char == "."}
    for pattern in patterns:
        if len(module) in _matcher(pattern)(module, starts):
            return pattern
    return module


# ------------------------------------------------------------------------- patterns
#
# A pattern is the adapter's word, and ``re`` can take for ever over one while it holds the
# interpreter. So patterns are matched here, by walking sets of positions: no pattern takes more
# than (its length) x (the name's length, squared) steps. What is accepted means what it means to
# ``re``; everything else is refused.

_Ends = Callable[[str, set[int]], set[int]]
"""(name, positions a match may start at) -> positions it may end at."""

_ATOM = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9\s]|\[\^?[A-Za-z0-9_.\-]+\]|[A-Za-z0-9_.\-/ ]")
_REPEAT = re.compile(r"(?:([*+?])|\{([0-9]{1,3})(,([0-9]{1,3})?)?\})\??(?![*+?{])")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _PatternError(Exception):
    """Why a pattern is not accepted."""


@functools.lru_cache(maxsize=2 * MAX_PATTERNS)
def _matcher(pattern: str) -> _Ends:
    """Raises _PatternError: it is not one of the patterns accepted here."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _PatternError(f"has {len(pattern)} characters, wanted at most {MAX_PATTERN_CHARS}")
    return _PatternParser(pattern).parse()


class _PatternParser:
    """Accepts literals, ``.``, classes, ``^``, ``$``, groups with ``|``, and repeats of one
    character; at most ``MAX_REPEATS`` of those without a small bound.
    """

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._repeats = 0

    def parse(self) -> _Ends:
        ends = self._choice(0)
        if self._at < len(self._text):
            raise _PatternError("has a ')' that nothing opened")
        return ends

    def _choice(self, depth: int) -> _Ends:
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self, depth: int) -> _Ends:
        parts: list[_Ends] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._part(depth))
        return _in_turn(parts)

    def _part(self, depth: int) -> _Ends:
        if self._take("("):
            return self._group(depth + 1)
        if self._take("^"):
            part = _at_start
        elif self._take("$"):
            part = _at_end
        else:
            return self._repeated(self._atom())
        self._refuse_repeat("an anchor")
        return part

    def _group(self, depth: int) -> _Ends:
        if not self._take("?:") and self._text.startswith("?", self._at):
            raise _PatternError("has a group that starts with '(?', which is not accepted")
        if depth > MAX_GROUP_DEPTH:
            raise _PatternError(f"nests groups more than {MAX_GROUP_DEPTH} deep")
        ends = self._choice(depth)
        if not self._take(")"):
            raise _PatternError("has a group that does not end")
        self._refuse_repeat("a group")
        return ends

    def _atom(self) -> re.Pattern[str]:
        match = _ATOM.match(self._text, self._at)
        if match is None:
            raise _PatternError(f"has {self._text[self._at :][:12]!r}, which is not accepted")
        self._at = match.end()
        try:
            return re.compile(match[0])
        except re.error as error:
            raise _PatternError(f"has {match[0]!r}, which is no class: {error}") from None

    def _repeated(self, atom: re.Pattern[str]) -> _Ends:
        if not self._text.startswith(("*", "+", "?", "{"), self._at):
            return _run_of(atom, 1, 1)
        match = _REPEAT.match(self._text, self._at)
        if match is None:
            raise _PatternError(f"has {self._text[self._at :][:12]!r}, which is no repeat")
        self._at = match.end()
        sign, low, comma, high = match.groups()
        if sign != "?":
            self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise _PatternError(f"repeats more than {MAX_REPEATS} times")
        if sign is not None:
            return _run_of(atom, *_REPEATS[sign])
        most = int(high) if high else (None if comma else int(low))
        if most is not None and most < int(low):
            raise _PatternError(f"has {match[0]!r}, whose bounds are the wrong way round")
        return _run_of(atom, int(low), most)

    def _refuse_repeat(self, what: str) -> None:
        if self._text.startswith(("*", "+", "?", "{"), self._at):
            raise _PatternError(f"repeats {what}, which is not accepted")

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found


def _at_start(name: str, starts: set[int]) -> set[int]:
    return starts & {0}


def _at_end(name: str, starts: set[int]) -> set[int]:
    return starts & {len(name)}


def _in_turn(parts: list[_Ends]) -> _Ends:
    def ends(name: str, starts: set[int]) -> set[int]:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return ends


def _any_of(branches: list[_Ends]) -> _Ends:
    def ends(name: str, starts: set[int]) -> set[int]:
        return set().union(*(branch(name, starts) for branch in branches))

    return ends


def _run_of(atom: re.Pattern[str], low: int, high: int | None) -> _Ends:
    """``low`` to ``high`` characters that the one-character pattern ``atom`` matches."""

    def ends(name: str, starts: set[int]) -> set[int]:
        found: set[int] = set(starts) if low == 0 else set()
        count, at = 0, starts
        while at and (high is None or count < high):
            at = {i + 1 for i in at if i < len(name) and atom.match(name, i)}
            count += 1
            if count >= low:
                found |= at
        return found

    return ends
