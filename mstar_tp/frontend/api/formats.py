"""The two answer formats, completions and chats, whole and as streamed chunks.

A chunk is written from parts that are encoded once a request; only the new text is encoded a token.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from mstar_tp.frontend.api.answers import Delta, Entry, Gathered
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.api.logprobs import chat_logprobs, completion_logprobs
from mstar_tp.frontend.text.tokenizer import TextTokenizer

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """``cached_tokens``: those of the prompt that were not computed."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Format(ABC):
    """Writes one API request's answer: whole, or as the events of a stream."""

    prefix: str

    def __init__(self, model: str, tokenizer: TextTokenizer) -> None:
        """``model``: the name that was asked for."""
        self._model = model
        self._tokenizer = tokenizer
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    @abstractmethod
    def body(self, choices: Sequence[Gathered], counts: dict[str, Any]) -> bytes:
        """The whole answer."""

    @abstractmethod
    def first_chunk(self, index: int) -> bytes:
        """Return what comes before choice ``index``'s first delta; empty when nothing does."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> bytes:
        """The event that carries ``delta`` of choice ``index``."""

    @abstractmethod
    def end(self, counts: dict[str, Any]) -> bytes:
        """A stream's last events."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """A stream's last events, when it cannot go on."""


class ChoicesFormat(Format):
    """Answers whose choices stand side by side."""

    whole: str
    chunked: str

    def __init__(
        self, model: str, tokenizer: TextTokenizer, *, include_usage: bool, logprobs: bool
    ) -> None:
        super().__init__(model, tokenizer)
        self._logprobs = logprobs
        self._include_usage = include_usage
        # Every chunk is: opening, index, field, text, then either plain ending or a spelt-out one.
        opening = _encode({**self._head, "object": self.chunked})[:-1]
        self._opening = b"data: " + opening + b',"choices":[{"index":'
        self._closing = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null' + self._closing

    def body(self, choices: Sequence[Gathered], counts: dict[str, Any]) -> bytes:
        return _encode(
            {
                **self._head,
                "object": self.whole,
                "choices": [
                    {
                        "index": index,
                        **self._whole_choice(choice),
                        "logprobs": self._entries(choice.entries),
                        "finish_reason": choice.finish,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": counts,
            }
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        start = b"%s%d%s" % (self._opening, index, self._field(delta))
        if delta.finish is None and not self._logprobs:
            return start + self._plain
        return b'%s,"logprobs":%s,"finish_reason":%s%s' % (
            start,
            _encode(self._entries(delta.entries)),
            _encode(delta.finish),
            self._closing,
        )

    def end(self, counts: dict[str, Any]) -> bytes:
        """Usage, when it was asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        head = {**self._head, "object": self.chunked, "choices": [], "usage": counts}
        return b"data: " + _encode(head) + b"\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def first_chunk(self, index: int) -> bytes:
        return b""

    def _entries(self, entries: list[Entry]) -> dict[str, Any] | None:
        return self._shape(entries) if self._logprobs else None

    @abstractmethod
    def _field(self, delta: Delta) -> bytes:
        """A chunk's text field, from the comma after the index on."""

    @abstractmethod
    def _whole_choice(self, choice: Gathered) -> dict[str, Any]:
        """A whole choice's text field."""

    @abstractmethod
    def _shape(self, entries: list[Entry]) -> dict[str, Any]:
        """Log probabilities as this format gives them."""


class CompletionFormat(ChoicesFormat):
    prefix = "cmpl"
    whole = "text_completion"
    chunked = "text_completion"

    def _field(self, delta: Delta) -> bytes:
        return b',"text":' + _encode(delta.text)

    def _whole_choice(self, choice: Gathered) -> dict[str, Any]:
        return {"text": choice.text}

    def _shape(self, entries: list[Entry]) -> dict[str, Any]:
        return completion_logprobs(entries, self._tokenizer)


class ChatFormat(ChoicesFormat):
    prefix = "chatcmpl"
    whole = "chat.completion"
    chunked = "chat.completion.chunk"

    def first_chunk(self, index: int) -> bytes:
        field = b',"delta":{"role":"assistant","content":""}'
        return b"%s%d%s%s" % (self._opening, index, field, self._plain)

    def _field(self, delta: Delta) -> bytes:
        if delta.calls:
            return b',"delta":' + _encode(self._with_calls(delta))
        if not delta.text:
            return b',"delta":{}'
        return b',"delta":{"content":' + _encode(delta.text) + b"}"

    def _with_calls(self, delta: Delta) -> dict[str, Any]:
        pieces = [
            {"index": piece.place, "function": {"arguments": piece.arguments}}
            if piece.id is None
            else {
                "index": piece.place,
                "id": piece.id,
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.arguments},
            }
            for piece in delta.calls
        ]
        said = {"content": delta.text} if delta.text else {}
        return {**said, "tool_calls": pieces}

    def _whole_choice(self, choice: Gathered) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {"message": message}

    def _shape(self, entries: list[Entry]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)
