"""POST /v1/responses: what of OpenAI's Responses API is a chat in other words, and its answers.

Nothing is stored: every request brings its whole input.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mstar_tp.frontend.api.answers import Delta, Gathered
from mstar_tp.frontend.api.api_errors import ApiError, FieldError, from_validation
from mstar_tp.frontend.api.formats import Format
from mstar_tp.frontend.api.protocol import INT64_MAX, MAX_MESSAGES, ChatRequest
from mstar_tp.frontend.text.tokenizer import TextTokenizer
from mstar_tp.frontend.text.tool_choice import MAX_TOOLS

_PASSED_ON = (
    "model", "lora_adapter", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority",
    "min_tokens", "ignore_eos", "stop_token_ids", "parallel_tool_calls", "chat_template_kwargs",
    "stream", "user",
)  # fmt: skip
"""Fields that mean what they mean in a chat."""
_TEXTS = ("input_text", "output_text", "text")


class _TextField(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str
    """The base model's name, or an adapter's."""
    input: str | list[dict[str, Any]]
    """A text, or messages, calls and their outputs in order."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    """Most tokens of the answer; unset: what the context has room for."""
    text: _TextField | None = None
    """``format``: text, json_object or json_schema."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """``none``, ``auto``, ``required``, or one function by name."""
    truncation: Literal["disabled", "auto"] | None = None
    """``disabled`` alone: nothing is cut here."""
    store: bool | None = None
    """Accepted; nothing is stored."""
    background: bool | None = None
    """False alone."""
    stream: bool | None = None
    """Send the answer as server-sent events."""
    previous_response_id: str | None = None
    """Refused: nothing is stored."""
    metadata: dict[str, str] | None = None
    """Given back with the answer."""
    include: list[str] | None = None
    """Refused unless empty."""

    @model_validator(mode="after")
    def _nothing_is_stored(self) -> Self:
        extra = self.model_extra or {}
        if self.previous_response_id is not None:
            raise FieldError(
                "previous_response_id",
                "is not served: this server stores no responses: send the whole conversation as "
                "input",
            )
        for name in ("conversation", "prompt"):
            if extra.get(name) is not None:
                raise FieldError(name, "is not served: this server stores nothing")
        if self.background:
            raise FieldError("background", "is not served: leave it out")
        if self.truncation == "auto":
            raise FieldError("truncation", "must be disabled: nothing is cut here")
        if self.include:
            raise FieldError("include", "is not served: leave it out")
        if not self.input:
            raise FieldError("input", "must not be empty")
        if isinstance(self.input, list) and len(self.input) > MAX_MESSAGES:
            raise FieldError(
                "input", f"must hold at most {MAX_MESSAGES} items, got {len(self.input)}"
            )
        return self

    def chat(self) -> ResponsesChat:
        """The chat that this is.

        Raises:
            ApiError: naming the field of this request that is at fault.
        """
        given = {**(self.model_extra or {}), "model": self.model, "stream": self.stream}
        fields = {name: given[name] for name in _PASSED_ON if name in given}
        try:
            fields["messages"] = self._messages()
            fields["max_completion_tokens"] = self.max_output_tokens
            fields["tools"] = self._tools()
            fields["tool_choice"] = self._tool_choice()
            fields["response_format"] = self._format()
            chat = ResponsesChat.model_validate(fields)
        except FieldError as error:
            raise ApiError.bad_request(f"{error.field}: {error}", param=error.field) from None
        except ValidationError as error:
            raise _in_these_words(from_validation(error)) from None
        chat._asked = self
        chat._ignored = [name for name in self.model_extra or {} if name not in _PASSED_ON]
        return chat

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for at, item in enumerate(self.input):
            self._add_item(item, f"input[{at}]", messages)
        return messages

    def _add_item(self, item: dict[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
        match item.get("type", "message"):
            case "message":
                role, content = item.get("role"), item.get("content")
                if role not in ("user", "assistant", "system", "developer"):
                    raise FieldError(f"{path}.role", "must be user, assistant, system or developer")
                messages.append(
                    {
                        "role": "system" if role == "developer" else role,
                        "content": _content(content, f"{path}.content"),
                    }
                )
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                last = messages[-1] if messages else {}
                if last.get("role") == "assistant":
                    last.setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = item.get("output")
                content = output if isinstance(output, str) else _content(output, f"{path}.output")
                messages.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                )
            case "reasoning":
                return  # what an earlier answer thought is no part of the conversation
            case _:
                raise FieldError(
                    f"{path}.type", "must be message, function_call or function_call_output"
                )

    def _tools(self) -> list[dict[str, Any]] | None:
        """Here a function's fields stand beside its type."""
        if self.tools is None:
            return None
        found = []
        for at, tool in enumerate(self.tools):
            if tool.get("type") != "function":
                raise FieldError(f"tools[{at}].type", "must be function: no others are served")
            function = {name: value for name, value in tool.items() if name != "type"}
            found.append({"type": "function", "function": function})
        return found

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") != "function":
            raise FieldError("tool_choice.type", "must be function: no others are served")
        return {"type": "function", "function": {"name": choice.get("name")}}

    def _format(self) -> dict[str, Any] | None:
        """Here a schema stands beside its type."""
        format_ = None if self.text is None else self.text.format
        if format_ is None or format_.get("type") != "json_schema":
            return format_
        schema = {name: value for name, value in format_.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


class ResponsesChat(ChatRequest):
    """A chat that was asked for as a response."""

    _asked: ResponsesRequest
    _ignored: list[str]

    @property
    def asked(self) -> ResponsesRequest:
        return self._asked

    @property
    def unknown_fields(self) -> list[str]:
        return self._ignored


def _content(content: Any, path: str) -> Any:
    """A message's content in a chat's words."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(path, "must be a string or a list of parts")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image":
            image = {"url": part.get("image_url"), "detail": part.get("detail")}
            parts.append({"type": "image_url", "image_url": image})
        elif kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        else:
            raise FieldError(f"{path}[{at}].type", "must be input_text or input_image")
    return parts


def _in_these_words(error: ApiError) -> ApiError:
    """A chat's refusal, with the fields named as they were sent."""
    param = error.param or ""
    for theirs, ours in (
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
    ):
        if param.startswith(theirs):
            own = ours if ours == "input" else ours + param.removeprefix(theirs)
            message = error.message.removeprefix(param)
            return ApiError.bad_request(own + message, param=own)
    return error


class ResponsesFormat(Format):
    """Writes one response. Its output is a list of items: a message, and calls of functions."""

    prefix = "resp"

    def __init__(self, body: ResponsesChat, tokenizer: TextTokenizer) -> None:
        super().__init__(body.requested, tokenizer)
        self._body = body
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The item that is being written."""
        self._finish: str | None = None

    # ------------------------------------------------------------------ whole

    def body(self, choices: Sequence[Gathered], counts: dict[str, Any]) -> bytes:
        (answer,) = choices
        items = []
        if answer.text or not answer.calls:
            items.append(_ended(_message(answer.text)))
        for call in answer.calls:
            items.append(_ended(_call(call.id, call.name, call.arguments)))
        return msgspec.json.encode(self._response(answer.finish, items, counts))

    def _response(
        self, finish: str | None, items: list[dict[str, Any]], counts: dict[str, Any] | None
    ) -> dict[str, Any]:
        asked = self._body.asked
        cut = finish == "length"
        status = "in_progress" if counts is None else "incomplete" if cut else "completed"
        format_ = None if asked.text is None else asked.text.format
        return {
            "id": str(self._head["id"]).replace("-", "_"),
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._head["model"],
            "output": items,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self._body.temperature is None else self._body.temperature,
            "text": {"format": format_ or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if self._body.top_p is None else self._body.top_p,
            "truncation": "disabled",
            "usage": None if counts is None else _usage(counts),
        }

    # ------------------------------------------------------------------ streamed

    def first_chunk(self, index: int) -> bytes:
        begun = self._response(None, [], None)
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        events = []
        if delta.text:
            if self._open is None or self._open["type"] != "message":
                events.append(self._begin(_message("")))
            events.append(self._say(delta.text))
        for piece in delta.calls:
            if piece.id is not None and piece.name is not None:
                events.append(self._begin(_call(piece.id, piece.name, "")))
            if piece.arguments:
                events.append(self._argue(piece.arguments))
        if delta.finish is not None:
            self._finish = delta.finish
            if self._open is None and not self._done:
                events.append(self._begin(_message("")))
            events.append(self._close())
        return b"".join(events)

    def end(self, counts: dict[str, Any]) -> bytes:
        response = self._response(self._finish, self._done, counts)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        code, message = str(error.code or error.type), error.message
        return self._event("error", code=code, message=message, param=error.param)

    def _begin(self, item: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = item
        shown = {**item, "content": []} if item["type"] == "message" else item
        added = self._event("response.output_item.added", output_index=self._place, item=shown)
        if item["type"] != "message":
            return closed + added
        part = item["content"][0]
        return closed + added + self._of_text("response.content_part.added", part=part)

    def _say(self, text: str) -> bytes:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def _argue(self, text: str) -> bytes:
        assert self._open is not None
        self._open["arguments"] += text
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item["type"] == "message":
            part = item["content"][0]
            done = self._of_text("response.output_text.done", text=part["text"], logprobs=[])
            done += self._of_text("response.content_part.done", part=part)
        else:
            done = self._of_item(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        ended = _ended(item)
        done += self._event("response.output_item.done", output_index=self._place, item=ended)
        self._done.append(ended)
        self._open = None
        return done

    @property
    def _place(self) -> int:
        return len(self._done)

    def _of_text(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(event))


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _ended(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "status": "completed"}


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
