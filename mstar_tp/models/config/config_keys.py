"""Typed reading of a Hugging Face config.json.

A refusal names file, key, value and what was wanted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mstar_tp.common.errors import CheckpointError
from mstar_tp.common.problems import Problems


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable or no JSON object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise CheckpointError(f"{path}: {cause.strerror}") from None
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: is not JSON: {cause}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(tree).__name__}")
    return tree


class Keys:
    """A JSON object of a config file; ``where`` names it in errors, nested keys with dots.

    A null reads as absent. ``problems`` takes what is wrong with values; beyond its limit they are
    raised. A value that is at fault reads as one of its kind, for nobody to use.
    """

    def __init__(self, tree: dict[str, Any], where: str, problems: Problems | None = None) -> None:
        self.tree = tree
        self.where = where
        self.problems = Problems() if problems is None else problems

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        """The error that says what ``key`` holds and what was wanted."""
        return CheckpointError(f"{self.where}: {key} is {self.tree.get(key)!r}, wanted {wanted}")

    def get(self, key: str) -> Any:
        return self.tree.get(key)

    def has(self, key: str) -> bool:
        return self.tree.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; required without a default."""

        def read() -> int:
            value = self._value(key, default)
            if type(value) is not int or value <= 0:
                raise self.refuse(key, "a positive integer")
            return value

        return self.problems.attempt(default or 1, read)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number; required without a default."""

        def read() -> float:
            value = self._value(key, default)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise self.refuse(key, "a positive number")
            return float(value)

        return self.problems.attempt(default or 1.0, read)

    def flag(self, key: str, default: bool) -> bool:
        def read() -> bool:
            value = self._value(key, default)
            if type(value) is not bool:
                raise self.refuse(key, "true or false")
            return value

        return self.problems.attempt(default, read)

    def choice(self, key: str, among: tuple[str, ...], default: str | None = None) -> str:
        """One of the strings ``among``; required without a default."""

        def read() -> str:
            value = self._value(key, default)
            if not isinstance(value, str) or value not in among:
                raise self.refuse(key, f"one of {', '.join(among)}")
            return value

        return self.problems.attempt(among[0], read)

    def table(self, key: str) -> Keys:
        """The nested object ``key``; an empty one when absent."""

        def read() -> dict[str, Any]:
            value = self._value(key, {})
            if not isinstance(value, dict):
                raise self.refuse(key, "an object")
            return value

        return Keys(self.problems.attempt({}, read), f"{self.where}: {key}", self.problems)

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty when absent."""

        def read() -> tuple[int, ...]:
            value = self._value(key, [])
            values = value if isinstance(value, list) else [value]
            if not all(type(v) is int and v >= 0 for v in values):
                raise self.refuse(key, "a token id or a list of token ids")
            return tuple(values)

        return self.problems.attempt((), read)

    def _value(self, key: str, default: Any) -> Any:
        value = self.tree.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where}: {key} is missing")
        return default
