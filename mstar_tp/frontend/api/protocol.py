"""The bodies of OpenAI's API that this server takes, checked field by field.

A field that is not known at all is accepted, as OpenAI's clients expect, and named in a warning. A
field that is known, not served here, and would change the answer is refused by name: an answer that
ignores it would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from mstar_tp.frontend.api.api_errors import FieldError
from mstar_tp.frontend.text.tool_choice import Structure, parsed_arguments

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_IDS = 1024
MAX_MESSAGES = 4096
MAX_PROMPT_IDS = 1_000_000
"""The most ids of all prompts of a request, where they are sent as ids."""
MAX_BIASES = 1024
MAX_PRIORITY = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Prompt = str | tuple[int, ...]


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: Any) -> list[Prompt]:
    """The four forms of a prompt as one list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, token ids, or lists of token ids")
    if not value:
        raise ValueError("must not be empty")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if _is_id_list(value):
        _check_num_ids(len(value))
        return [tuple(value)]
    if all(_is_id_list(item) for item in value):
        _check_num_ids(sum(map(len, value)))
        return [tuple(item) for item in value]
    raise ValueError("must hold strings only, token ids only, or lists of token ids only")


def _check_num_ids(count: int) -> None:
    if count > MAX_PROMPT_IDS:
        raise ValueError(f"must hold at most {MAX_PROMPT_IDS} token ids, got {count}")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if not all(stops):
        raise ValueError("must not hold an empty string")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must hold at most {MAX_STOPS} strings, got {len(stops)}")
    return tuple(stops)


def _top_p(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def _top_k(value: int | None) -> int | None:
    if value is not None and value < -1:
        raise ValueError("must be positive, or 0 or -1 for no limit")
    return value


def _biases(value: Any) -> Any:
    """{"token id": bias} as [(id, bias)]."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"must hold at most {MAX_BIASES} tokens, got {len(value)}")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("must have token ids for keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"[{key}] must be a number from -100 to 100")
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))


_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_STOP_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})
_BIAS_SCHEMA = WithJsonSchema(
    {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
)
_PROMPT_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
)
"""The form in which these fields are sent, for the API's document."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class _Body(BaseModel):
    """The fields that completions and chats share.

    None, in any field, is the same as leaving it out.
    """

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, protected_namespaces=(), extra="allow"
    )

    model: str
    """The base model's name, or an adapter's."""
    lora_adapter: str | None = None
    """An adapter's name; overrides ``model``."""
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Most tokens; unset: 16, in chats what the context leaves. 0 only with ``echo``."""
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Tokens before an end token or stop string can end the answer."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: the likeliest token always. Unset: 1."""
    top_p: Annotated[float, AfterValidator(_top_p)] | None = None
    """Sample from the likeliest tokens that have this much probability together."""
    top_k: Annotated[int, Field(le=INT64_MAX), AfterValidator(_top_k)] | None = None
    """Sample from this many likeliest tokens; 0 or -1: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    """The same request with the same seed samples the same tokens."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken from the logit of every token that the answer holds already."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same, once for each time it holds it."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt and answer."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to each prompt."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops), _STOP_SCHEMA] = ()
    """Texts that end an answer."""
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], BeforeValidator(_biases), _BIAS_SCHEMA
    ] = ()
    """Token id to what is added to its logit, before penalties: -100 to 100."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower is let in first; needs ``scheduling_policy: priority``."""
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_IDS)] | None
    ) = None
    """Tokens that end an answer."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string at the end of the text."""
    ignore_eos: bool | None = None
    """Go on past the model's end tokens."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text (default true)."""
    stream: bool | None = None
    """Send the answer piece by piece, as server-sent events."""
    stream_options: StreamOptions | None = None
    """``include_usage``: a last piece with the tokens used."""
    user: str | None = None
    """Accepted, changes nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, harmless in UNSERVED.items():
                given = None if name in cls.model_fields else value.get(name)
                if given is not None and not harmless(given):
                    raise FieldError(name, "is not served here: leave it out")
        return value

    @field_validator("model", "lora_adapter")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must not be empty")
        return value

    @property
    def echoes(self) -> bool:
        """The answer's text begins with the prompt's."""
        return False

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echoes:
            raise FieldError("max_tokens", "must be at least 1, but with echo, where it may be 0")
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is only for requests with stream true")
        return self

    @property
    def requested(self) -> str:
        """The name that the answer carries as its ``model``."""
        return self.lora_adapter or self.model

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def attempts(self) -> int:
        """Answers that are generated for each prompt, of which the best ``choices`` are given."""
        return self.choices

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that nothing here reads, and that change nothing."""
        found = [name for name in self.model_extra or {} if name not in UNSERVED]
        options = self.stream_options
        if options is not None:
            found += [f"stream_options.{name}" for name in options.model_extra or {}]
        return found

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Body):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts), _PROMPT_SCHEMA]
    """Text, token ids, or a list of either."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Likeliest tokens told at each place, with their log probabilities."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers generated for each prompt, of which the ``n`` likeliest are given."""
    add_special_tokens: bool | None = None
    """Begin the prompt as the tokenizer does (default true)."""
    echo: bool | None = None
    """The answer's text begins with the prompt's."""

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise FieldError("best_of", "must be at least n")
        if self.stream and self.attempts > self.choices:
            raise FieldError("best_of", "must equal n where the answer streams")
        return self

    @property
    def attempts(self) -> int:
        return self.best_of or self.choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def logprobs_field(self) -> str:
        return "logprobs"


class ChatRequest(_Body, Structure):
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    """The chat: role and content of each message."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    """Most tokens of an answer; it goes before ``max_tokens``."""
    logprobs: bool | None = None
    """Tell the log probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Likeliest tokens told at each place; needs ``logprobs``."""
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant begins (default true)."""
    continue_final_message: bool | None = None
    """Let the answer go on in the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Given to the chat template."""

    @field_validator("messages")
    @classmethod
    def _plain_messages(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not value:
            raise ValueError("must not be empty")
        return [
            _plain_message(f"messages[{index}]", message) for index, message in enumerate(value)
        ]

    @property
    def image_urls(self) -> list[str]:
        """Return the URL of every image, in the order they stand in the messages."""
        return [
            str(part["url"])
            for message in self.messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image"
        ]

    @model_validator(mode="after")
    def _logprobs_first(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _structured(self) -> Self:
        self.check_structure()
        held = self.response_format is not None and self.response_format.type != "text"
        if held or self.tool_choice not in (None, "none", "auto"):
            field = "response_format" if held else "tool_choice"
            for name in ("min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise FieldError(name, f"cannot go with {field}, whose answer ends by itself")
        return self

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message", "and add_generation_prompt cannot both be true"
            )
        return self

    @property
    def opens_turn(self) -> bool:
        """Return whether the prompt ends where the assistant begins to speak."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs"


def _plain_message(path: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one string, its text parts joined.

    Where it holds images, the content is a list of parts: {type: text, text} and {type: image,
    url}.
    """
    if not isinstance(message.get("role"), str):
        raise FieldError(f"{path}.role", "is required, and must be a string")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise FieldError(f"{path}.tool_calls", "must be a list")
        message = {**message, "tool_calls": parsed_arguments(calls, f"{path}.tool_calls")}
    if content is None:
        if not calls:
            raise FieldError(f"{path}.content", "is required")
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise FieldError(f"{path}.content", "must be a string or a list of parts")
    parts = [_part(f"{path}.content[{at}]", part) for at, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _part(path: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise FieldError(f"{path}.text", "must be a string")
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        image = part.get("image_url")
        if not isinstance(image, dict) or not isinstance(image.get("url"), str):
            raise FieldError(f"{path}.image_url", "must be an object with a url")
        if image.get("detail") not in (None, "auto", "low", "high"):
            raise FieldError(f"{path}.image_url.detail", "must be auto, low or high")
        return {"type": "image", "url": image["url"]}
    raise FieldError(f"{path}.type", "must be text or image_url")


def _never(_: Any) -> bool:
    return False


def _empty(value: Any) -> bool:
    return value in ({}, [], "")


UNSERVED: dict[str, Callable[[Any], bool]] = {
    "echo": lambda value: value is False,
    "suffix": _empty,
    "tools": _empty,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _empty,
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "audio": _never,
    "web_search_options": _never,
    "documents": _empty,
    "chat_template": _never,
    "prompt_embeds": _never,
    "prompt_logprobs": _never,
    "use_beam_search": lambda value: value is False,
    "length_penalty": lambda value: value == 1,
    "bad_words": _empty,
    "allowed_token_ids": _never,
    "truncate_prompt_tokens": _never,
    "logits_processors": _empty,
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
}
"""Field -> which values of it change nothing, in requests that do not have it.

Read by this module and its tests.
"""
