"""The most characters of a text that one token can stand for.

With it, a text that cannot fit a context is found without tokenizing it. Pure; any thread.

A bound is given only for tokenizers of which every step is known to drop no text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_COMPOSED = 4
"""No character's canonical decomposition is longer, so no composition takes in more characters."""
_KEEPING_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a prompt that one token can stand for; None when there is no bound."""
    state = json.loads(tokenizer.to_str())
    shrink = _shrink(state["normalizer"])
    added = state["added_tokens"]
    if (
        shrink is None
        or not _keeps_text(state["pre_tokenizer"])
        or not _knows_every_byte(state["model"], state["pre_tokenizer"])
        # These take in all the white space beside them.
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    texts = list(tokenizer.get_vocab(with_added_tokens=True))
    if tokenizer.normalizer is not None:
        # Tokens that are looked for in normalized text are normalized too, and may grow by that.
        texts += [
            tokenizer.normalizer.normalize_str(token["content"])
            for token in added
            if token["normalized"]
        ]
    return shrink * max(map(len, texts))


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many characters may become one; None when unknown, or any number may vanish."""
    match normalizer:
        case None | {"type": "Prepend" | "NFD" | "NFKD"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 1 if len(new) >= len(old) else None
        case {"type": "Sequence", "normalizers": steps}:
            product = 1
            for factor in map(_shrink, steps):
                if factor is None:
                    return None
                product *= factor
            return product
    return None


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return behavior in _KEEPING_SPLITS
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_keeps_text, steps))
    return False


def _knows_every_byte(model: Mapping[str, Any], pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether the model has a token for all it is given.

    Else runs of what it does not know are dropped, or become one token.
    """
    if model["type"] != "BPE":
        return False
    vocab = model["vocab"]
    if model["byte_fallback"]:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    byte_level = any(step is not None and step["type"] == "ByteLevel" for step in steps)
    return byte_level and all(char in vocab for char in pre_tokenizers.ByteLevel.alphabet())
