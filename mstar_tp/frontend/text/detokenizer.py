"""Token ids into text, one token at a time, the same whether an answer streams or not.

A character that is split over tokens is held back until its last byte is in: no U+FFFD appears
while more bytes can come. Bytes that are no UTF-8 become one U+FFFD each run, and so does a
character that the end cuts off. One detokenizer belongs to one answer; one thread at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"
MAX_HELD = 64
"""Tokens that may wait for the end of a character where only the tokenizer knows their bytes."""


class Detokenizer(Protocol):
    """Turns one answer's tokens into text, piece by piece."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is still open."""

    def finish(self) -> str:
        """Return what is still held, at the end of the answer.

        Nothing may be pushed after it.
        """


class TokenBytes:
    """The bytes each token stands for, looked up once and kept. One a tokenizer; any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self.exact = _understood(steps)
        """Whether tokens' bytes are all there is to decoding; else only windows of tokens tell."""
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = _replacements(steps)

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of an id; of one that the tokenizer does not know, none."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if not self.exact:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in text)
            except KeyError:
                return text.encode()  # an added token, kept as it is written
        byte = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            text = text.replace(old, new)
        return text.encode()


class ByteDetokenizer:
    """A detokenizer for decoders whose text is the tokens' bytes in a row."""

    def __init__(self, table: TokenBytes, hidden: frozenset[int]) -> None:
        """``hidden``: ids that leave no text (special tokens)."""
        self._table = table
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._decoder.decode(self._table[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for any other decoder.

    It decodes a window of the last tokens, and takes what the newest add.

    A window that ends in U+FFFD may be cut inside a character: its text waits, for a bounded number
    of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], hidden: frozenset[int]) -> None:
        """``prompt``: the first word's leading space depends on what stands before it."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = [token for token in prompt[-8:] if token not in hidden]
        self._start = 0
        self._read = len(self._ids)

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        before, text = self._window()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_HELD:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        before, text = self._window()
        self._start = self._read = len(self._ids)
        return text[len(before) :]

    def _window(self) -> tuple[str, str]:
        before = self._decode(self._ids[self._start : self._read])
        return before, self._decode(self._ids[self._start :])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    root = json.loads(tokenizer.decoder.__getstate__())
    return list(root["decoders"]) if root["type"] == "Sequence" else [root]


def _understood(steps: list[dict[str, Any]]) -> bool:
    """Return whether every step works on one token, or (Strip) only on the very start of a text.

    A prompt stands before every answer here, so the start of the text is never in it.
    """
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    if "Fuse" not in kinds and "ByteFallback" not in kinds:
        return False
    plain = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    strips = [step for step in steps if step["type"] == "Strip"]
    after_fuse = not strips or "Fuse" in kinds[: kinds.index("Strip")]
    start_only = all(step["stop"] == 0 for step in strips)
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    return known and plain and after_fuse and start_only


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character: this maps them back.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
