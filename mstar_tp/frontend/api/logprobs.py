"""Log probabilities in the two shapes OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar_tp.frontend.api.answers import Entry
from mstar_tp.frontend.text.tokenizer import TextTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def completion_logprobs(entries: Sequence[Entry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Parallel lists, as completions carry them. Offsets count from the answer's start."""
    return {
        "tokens": [_text(entry.token, tokenizer) for entry in entries],
        "token_logprobs": [
            None if entry.logprobs is None else _finite(entry.logprobs.chosen) for entry in entries
        ],
        "top_logprobs": [_top(entry, tokenizer) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[Entry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """One object a token, as chats carry them."""
    return {
        "content": [
            {
                **_token(entry.token, entry.logprobs.chosen, tokenizer),
                "top_logprobs": [
                    _token(token, value, tokenizer)
                    for token, value in zip(entry.logprobs.top_ids, entry.logprobs.top, strict=True)
                ],
            }
            for entry in entries
            if entry.logprobs is not None
        ],
        "refusal": None,
    }


def _top(entry: Entry, tokenizer: TextTokenizer) -> dict[str, float] | None:
    """The best alternatives and always the chosen token; of two with one text, the likelier."""
    if entry.logprobs is None:
        return None
    top = {_text(entry.token, tokenizer): _finite(entry.logprobs.chosen)}
    for token, value in zip(entry.logprobs.top_ids, entry.logprobs.top, strict=True):
        text = _text(token, tokenizer)
        top[text] = max(_finite(value), top.get(text, LOWEST))
    return top


def _token(token: int, value: float, tokenizer: TextTokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": _finite(value),
        "bytes": list(data),
    }


def _text(token: int, tokenizer: TextTokenizer) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return max(value, LOWEST)
