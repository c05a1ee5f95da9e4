"""A request's bytes into plain JSON values, or an error that names the field at fault."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Never, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mstar_tp.frontend.api.api_errors import (
    ApiError,
    from_validation,
    printable,
    unavailable,
    wrong_shape,
)

MAX_BODY_BYTES = 32 * 2**20
MAX_HELD_BYTES = 256 * 2**20
"""The most bytes of all bodies that come in or wait to be prepared, together."""
MAX_SMALL_BODY_BYTES = 64 * 2**10
"""The most bytes of a body that holds names, paths and numbers alone."""
PARSE_INLINE_BYTES = 64 * 2**10
"""The most bytes of a body that is parsed at once, without a thread."""
MAX_COMMAS = 2**20
"""The most commas of a body: they separate its values, whose decoding cannot be interrupted."""

Model = TypeVar("Model", bound=BaseModel)

__all__ = ["BodyBudget", "ClientDisconnect", "Held", "checked", "parse", "read_body"]


class BodyBudget:
    """Bounds the bytes of the bodies that are held at once. The event loop's thread."""

    def __init__(self) -> None:
        self._used = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[Held]:
        """Room for one body, given back at the end at the latest."""
        held = Held(self)
        try:
            yield held
        finally:
            held.give_back()

    def add(self, size: int) -> None:
        """Raises ApiError: 503, there is no room for ``size`` bytes more."""
        if self._used + size > MAX_HELD_BYTES:
            raise unavailable(
                f"the server holds {self._used} of at most {MAX_HELD_BYTES} bytes of requests that "
                "are being read or prepared: try again later",
                code="queue_full",
            )
        self._used += size

    def remove(self, size: int) -> None:
        self._used -= size


class Held:
    """The bytes that one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def add(self, size: int) -> None:
        """Raises ApiError: 503, there is no room."""
        self._budget.add(size)
        self._size += size

    def give_back(self) -> None:
        """Idempotent."""
        self._budget.remove(self._size)
        self._size = 0


async def read_body(request: Request, held: Held, most: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. How long it may take to come is the connection's to know (``gate``).

    Raises:
        ApiError: it is larger than ``most``, or there is no room to hold it.
        ClientDisconnect: the client left first, or took too long.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise ApiError(413, f"the request body is larger than {most} bytes")
        held.add(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def parse(model: type[Model], body: bytes) -> Model:
    """``body`` as a ``model``.

    Raises:
        ApiError: not JSON, not UTF-8, too many values, or a field that ``model`` refuses.
    """
    return checked(model, _decode(body))


def checked(model: type[Model], value: Any) -> Model:
    """A decoded body as a ``model``.

    Raises:
        ApiError: no object, or a field that ``model`` refuses.
    """
    if not isinstance(value, dict):
        raise ApiError.bad_request(
            f"the request body must be a JSON object, got {wrong_shape(value)}"
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _decode(body: bytes) -> Any:
    _check_commas(body)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_slowly(body)


def _check_commas(body: bytes) -> None:
    if len(body) <= MAX_COMMAS:
        return
    count, step = 0, 2**20
    for start in range(0, len(body), step):
        count += body.count(b",", start, start + step)
        if count > MAX_COMMAS:
            raise ApiError(
                413,
                f"the request body has more than {MAX_COMMAS} commas, so too many values: send "
                "fewer at once",
            )


def _decode_slowly(body: bytes) -> Any:
    """Return what the fast decoder refused: find out what it is, and in which field."""
    try:
        value = json.loads(body.decode("utf-8", "surrogateescape"), parse_constant=_no_constant)
        path = _find_bad_text(value)
    except RecursionError:
        raise ApiError.bad_request("the request body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError.bad_request(
            f"the request body is not valid JSON: {error.msg} at line {error.lineno} "
            f"column {error.colno}"
        ) from None
    except ValueError as error:
        raise ApiError.bad_request(f"the request body is not valid JSON: {error}") from None
    if path is not None:
        where = "".join(path).removeprefix(".")
        param = where.split(".")[0].split("[")[0] or None
        raise ApiError.bad_request(
            f"{printable(where) or 'the request body'}: holds bytes or escapes that are no valid "
            "Unicode text (an unpaired surrogate, or bytes that are not UTF-8)",
            param=None if param is None else printable(param),
        )
    return value


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _find_bad_text(value: Any) -> list[str] | None:
    """The path to the first text that UTF-8 cannot say, depth first."""
    if isinstance(value, str):
        return None if _is_text(value) else []
    if isinstance(value, dict):
        for key, item in value.items():
            if not _is_text(key):
                return [f".{key}"]
            path = _find_bad_text(item)
            if path is not None:
                return [f".{key}", *path]
    if isinstance(value, list):
        for index, item in enumerate(value):
            path = _find_bad_text(item)
            if path is not None:
                return [f"[{index}]", *path]
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
