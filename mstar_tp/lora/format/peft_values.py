"""Values of adapter_config.json, each checked for its type and range. No torch.

Every function takes ``where`` (the file) and the key for its errors, and raises AdapterError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.strict_json import show as _shown
from mstar_tp.lora.format.patterns import PatternError, PatternTable, matches

MAX_RANK = 1 << 20
MAX_ALPHA = 1e30
"""Sizes beyond any adapter's: numbers up to here divide and multiply without overflow."""

T = TypeVar("T")


def count(where: str, key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterError(
            f"{where}: {key} is {got(value)}, wanted a whole number from 1 to {MAX_RANK}"
        )
    return value


def number(where: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise AdapterError(
            f"{where}: {key} is {got(value)}, wanted a number (of at most {MAX_ALPHA:g})"
        )
    return float(value)


def flag(where: str, key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise AdapterError(f"{where}: {key} is {_shown(value)}, wanted true or false")


def got(value: Any) -> str:
    return "missing" if value is None else _shown(value)


def patterns(
    where: str, key: str, value: Any, parse: Callable[[str, str, Any], T]
) -> PatternTable[T]:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise AdapterError(
            f"{where}: {key} is {_shown(value)}, wanted a mapping of module patterns"
        )
    try:
        return PatternTable(
            {pattern: parse(where, f"{key}[{_shown(pattern)}]", v) for pattern, v in value.items()}
        )
    except PatternError as error:
        raise AdapterError(
            f"{where}: {key} {_cut(str(error))}: name the modules or the dotted ends of their "
            "names instead"
        ) from None


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:200]}...{text[-197:]}"


def strings(where: str, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise AdapterError(f"{where}: {key} is {_shown(value)}, wanted a list of module names")
    return tuple(value)


def parameters(where: str, key: str, value: Any) -> frozenset[str]:
    return frozenset(strings(where, key, value))


def modules(where: str, key: str, value: Any) -> frozenset[str] | str | None:
    if value is None or isinstance(value, str):
        return value
    return frozenset(strings(where, key, value))


def excluded(where: str, key: str, value: Any) -> frozenset[str] | str:
    if not isinstance(value, str):
        return frozenset(strings(where, key, value))
    try:
        matches(value, "")
    except PatternError as error:
        raise AdapterError(
            f"{where}: {key} {_shown(value)} {_cut(str(error))}: give a list of module "
            "names instead"
        ) from None
    return value


def layers(where: str, key: str, value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    listed = [value] if type(value) is int else value
    if not isinstance(listed, list) or not all(type(v) is int and v >= 0 for v in listed):
        raise AdapterError(f"{where}: {key} is {_shown(value)}, wanted layer numbers")
    return frozenset(listed)


def layers_patterns(where: str, tree: Mapping[str, Any]) -> tuple[str, ...]:
    value = tree.get("layers_pattern")
    listed = [value] if isinstance(value, str) and value else value or []
    words = isinstance(listed, list) and all(
        isinstance(word, str) and re.fullmatch(r"\w+", word) for word in listed
    )
    if not words:
        raise AdapterError(
            f"{where}: layers_pattern is {_shown(value)}, wanted the name of a stack of layers, as "
            "'layers', or a list of such"
        )
    return tuple(listed)


def token_ids(where: str, value: Any) -> dict[str, tuple[int, ...]]:
    if value is None or value in ([], {}):
        return {}
    tables = {"embed_tokens": value} if isinstance(value, list) else value
    if not isinstance(tables, dict):
        raise AdapterError(
            f"{where}: trainable_token_indices is {_shown(value)}, wanted token ids, or token ids "
            "by module"
        )
    return {name: _ids(where, name, ids) for name, ids in tables.items()}


def _ids(where: str, module: str, value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 31 for v in value)
    if not whole or len(set(value)) != len(value):
        raise AdapterError(
            f"{where}: trainable_token_indices of {_shown(module)} are {_shown(value)}, wanted "
            "different token ids"
        )
    return tuple(value)
