"""Errors as clients see them: always OpenAI's error shape, never a traceback.

``ApiError`` carries a status, a sentence and the field at fault. Messages name fields and sizes;
they never repeat what the client sent beyond a short, printable name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from mstar_tp.common.errors import RequestError

RETRY_AFTER_S = 1
MAX_NAMED = 20
"""The most fields that a warning names."""
SHOWN_CHARS = 100
"""The most characters of a client's name for something, in a message about it."""


class ApiError(RequestError):
    """Ends a request with ``status`` and one clear sentence; ``param`` is the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.message = message
        self.code = code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body, valid UTF-8 whatever the message holds."""
        error = {
            "message": printable(self.message, limit=None),
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    @classmethod
    def bad_request(
        cls, message: str, param: str | None = None, code: str | int | None = None
    ) -> ApiError:
        return cls(400, message, param=param, code=code)

    @classmethod
    def unknown_model(cls, name: str, param: str = "model") -> ApiError:
        return cls(
            404,
            f"The model '{printable(name)}' does not exist here: "
            "GET /v1/models lists what is served.",
            param=param,
            code="model_not_found",
        )

    @classmethod
    def unauthorized(cls) -> ApiError:
        return cls(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    @classmethod
    def overloaded(cls, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
        """Return the error for a request past the most that the server holds."""
        return cls.unavailable(
            f"The server holds as many requests as it may: try again in {retry_after_s} s.",
            code="overloaded",
            retry_after_s=retry_after_s,
        )

    @classmethod
    def unavailable(
        cls, reason: str, code: str | None = None, *, retry_after_s: int = RETRY_AFTER_S
    ) -> ApiError:
        """The server cannot take the request now; the client may come back."""
        return cls(503, reason, code=code, headers={"Retry-After": str(retry_after_s)})

    @classmethod
    def internal(cls, message: str) -> ApiError:
        return cls(500, message)


bad_request = ApiError.bad_request
no_such_model = ApiError.unknown_model
unavailable = ApiError.unavailable


def prompt_too_long(field: str, count: int, context: int) -> ApiError:
    """Return the error for a prompt of ``count`` tokens in the request's ``field``."""
    return bad_request(
        f"{field}: has {count} tokens, and the model's context is {context} tokens, answer "
        "included: shorten it",
        param=field,
        code="context_length_exceeded",
    )


def printable(text: str, limit: int | None = SHOWN_CHARS) -> str:
    """``text`` cut to ``limit`` characters, with what UTF-8 cannot say replaced."""
    if limit is not None and len(text) > limit:
        text = text[:limit] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def warning_header(fields: Sequence[str]) -> bytes:
    """A Warning header's value that names ``fields``, which nothing here reads; empty for none."""
    if not fields:
        return b""
    names = ", ".join(printable(field, 40) for field in fields[:MAX_NAMED])
    more = f" and {len(fields) - MAX_NAMED} more" if len(fields) > MAX_NAMED else ""
    plain = (names + more).encode("ascii", "replace").decode()
    shown = "".join(char if char.isprintable() and char not in '"\\' else "?" for char in plain)
    return f'299 mstar-tp "fields that are not known here and change nothing: {shown}"'.encode()


class FieldError(ValueError):
    """Raised inside a pydantic model by a check that reads several fields, for ``field``."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body that a pydantic model refused."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = [part for part in first["loc"] if not _names_a_union_member(part)]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        path = [cause.field]
    param = _dotted(path) or None
    where = _dotted(path) or "the request body"
    limits = first.get("ctx", {})
    if first["type"] == "too_long" and isinstance(limits.get("actual_length"), int):
        most, got = limits["max_length"], limits["actual_length"]
        return bad_request(f"{where}: must hold at most {most} items, got {got}", param=param)
    return bad_request(f"{where}: {_sentence(first['type'], first['msg'])}", param=param)


def _names_a_union_member(part: int | str) -> bool:
    return isinstance(part, str) and not part.isidentifier()


def _dotted(path: list[int | str]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


_TYPES = {
    "missing": "is required",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def _sentence(kind: str, message: str) -> str:
    known = _TYPES.get(kind)
    if known is not None:
        return known
    return message.removeprefix("Value error, ").replace("Input should be", "must be")


def wrong_shape(value: Any) -> str:
    """The JSON name of a value's kind, for messages."""
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), "a value")
