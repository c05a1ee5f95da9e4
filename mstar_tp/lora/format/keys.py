"""Keys of adapter files taken apart: the module, and the part of its adapter. No torch.

Three spellings of a low-rank pair are read: PEFT's (``lora_A``, ``lora_B``), the dotted one of
diffusers (``lora_linear_layer.down``, ``lora.up``, ``lora_down``), and Kohya's, whose module is one
word with underscores (``lora_te_model_layers_0_self_attn_q_proj.lora_down``).
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """The part of a module's adapter that a tensor is."""

    A = "lora_A"
    B = "lora_B"
    BIAS = "lora_B.bias"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    ALPHA = "alpha"
    TOKENS = "trainable_tokens_delta"
    SAVED = "modules_to_save"
    """A whole tensor in the place of the base model's."""
    BASE = "base_layer"
    """A copy of a tensor of the base model, as PEFT and full state dicts keep it beside LoRA."""
    PLAIN = "weight"
    """A whole tensor under the base model's own name: SAVED where the config says so, else BASE."""


class Spelling(Enum):
    """The spelling of a pair, which says where its scaling comes from."""

    PEFT = "PEFT"
    DOTTED = "diffusers"
    KOHYA = "Kohya"


class Key(NamedTuple):
    """One key, taken apart.

    ``module`` is spelled as the file spells it, ``tensor`` (weight or bias) is the name of a whole
    tensor, ``adapter`` the adapter's name where the key has one.
    """

    text: str
    module: str
    role: Role
    spelling: Spelling
    adapter: str = ""
    tensor: str = "weight"


_NAME = r"(?:\.(?P<adapter>[^.]+))?"
_PEFT_RULES: tuple[tuple[re.Pattern[str], dict[str, Role]], ...] = tuple(
    (re.compile(rf"(?P<module>.+)\.{tail}"), roles)
    for tail, roles in (
        (rf"(?P<part>lora_[AB]){_NAME}\.weight", {"lora_A": Role.A, "lora_B": Role.B}),
        (rf"(?P<part>lora_B){_NAME}\.bias", {"lora_B": Role.BIAS}),
        (
            rf"(?P<part>lora_embedding_[AB]){_NAME}",
            {"lora_embedding_A": Role.EMBEDDING_A, "lora_embedding_B": Role.EMBEDDING_B},
        ),
        (
            rf"(?P<part>trainable_tokens_delta){_NAME}",
            {"trainable_tokens_delta": Role.TOKENS},
        ),
        (
            rf"(?P<part>modules_to_save){_NAME}\.(?P<tensor>weight|bias)",
            {"modules_to_save": Role.SAVED},
        ),
        (
            r"(?P<part>base_layer|original_module)\.(?P<tensor>weight|bias)",
            {"base_layer": Role.BASE, "original_module": Role.BASE},
        ),
    )
)
_DOTTED = re.compile(
    r"(?P<module>.+?)(?:\.lora_linear_layer\.|\.lora\.|_lora\.|\.lora_)(?P<part>down|up)\.weight"
)
_KOHYA = re.compile(
    r"(?P<module>(?:lora|lycoris)_[^.]+)\.(?:lora_(?P<part>down|up)\.weight|(?P<alpha>alpha))"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
_PLAIN = re.compile(r"(?P<module>.+)\.(?P<tensor>weight|bias)")
_HALVES = {"down": Role.A, "up": Role.B}

_REFUSED = (
    (r"lora_magnitude|dora_scale", "is a DoRA magnitude"),
    (r"\bhada_", "is a LoHa tensor"),
    (r"\blokr_", "is a LoKr tensor"),
    (r"\boft_|\bboft_", "is an OFT tensor"),
    (r"\bvera_|\blora_lambda", "is a VeRA tensor"),
    (r"\bia3_", "is an IA3 tensor"),
    (r"\.lora_E\b|\.ranknum\b|\bt_ranknum", "is an AdaLoRA tensor"),
    (r"\.lora_(mid|t1|t2)\b", "is the core of a Tucker decomposition (LoCon)"),
    (r"\.(diff|diff_b|w_norm|b_norm|norm|scalar|bias_ind|on_input)$", "is a LyCORIS tensor"),
    (r"\blora_diag\b", "is a KaSA diagonal"),
    (r"\blora_monteclora", "belongs to a MonteCLoRA sampler"),
    (r"\bprompt_embeddings\b|\bprompt_encoder\b", "is a prompt, no LoRA tensor"),
    (r"\badaption_|\bprefix_", "is an adaption prompt, no LoRA tensor"),
    (r"\.lora_[ab]$", "is an MLX factor, which is kept transposed: convert it to PEFT's format"),
)
"""Keys that are refused whatever module they name: (pattern found in the key, what it is)."""
_ANY_REFUSED = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _REFUSED))


NESTED = ".base_layer"
"""The word that PEFT adds to a module's name for each wrapper inside the outermost."""


def refused_kind(text: str) -> str | None:
    """The reason why a tensor of this name can never be served, or None."""
    if _ANY_REFUSED.search(text) is None:
        return None
    return next((why for pattern, why in _REFUSED if re.search(pattern, text)), None)


def parse_key(text: str) -> Key | None:
    """The key taken apart; None when it is none of those known here."""
    for rule, roles in _PEFT_RULES:
        match = rule.fullmatch(text)
        if match is not None:
            found = match.groupdict()
            return Key(
                text,
                found["module"].removesuffix(".token_adapter"),
                roles[found["part"]],
                Spelling.PEFT,
                found.get("adapter") or "",
                found.get("tensor") or "weight",
            )
    return _kohya_or_dotted(text) or _plain(text)


def _kohya_or_dotted(text: str) -> Key | None:
    match = _KOHYA.fullmatch(text)
    if match is not None:
        role = Role.ALPHA if match["alpha"] else _HALVES[match["part"]]
        return Key(text, match["module"], role, Spelling.KOHYA)
    match = _DOTTED.fullmatch(text)
    if match is not None:
        return Key(text, match["module"], _HALVES[match["part"]], Spelling.DOTTED)
    match = _ALPHA.fullmatch(text)
    return None if match is None else Key(text, match["module"], Role.ALPHA, Spelling.DOTTED)


def _plain(text: str) -> Key | None:
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    return Key(text, match["module"], Role.PLAIN, Spelling.PEFT, tensor=match["tensor"])


def without_nesting(module: str) -> str:
    """The module that PEFT nested wrappers of its parameters around."""
    while module.endswith(NESTED):
        module = module.removesuffix(NESTED)
    return module
