"""What the sections of the configuration have in common: frozen, strict, and able to say all that
is wrong with them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MAX_INT = 2**63 - 1
"""The largest number that messages to ranks, tensors and the kernel can all hold."""

Positive = Annotated[int, Field(gt=0, le=MAX_INT)]


class Fault(NamedTuple):
    """Keys of one section that do not go together.

    ``text`` has a {} for the name of each; ``entry`` is the one of the first key's entries that is
    at fault, where not all of it is.
    """

    text: str
    keys: tuple[str, ...]
    entry: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        """Of what is at fault, within the section. An entry's name may hold dots."""
        return (*self.keys[0].split("."), *self.entry)


class FaultsError(ValueError):
    """All faults of a section at once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.text.format(*fault.keys) for fault in faults))
        self.faults = tuple(faults)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def _faults(self) -> Iterator[Fault]:
        """Return what values that are right by themselves are wrong together."""
        yield from ()

    @model_validator(mode="after")
    def _together(self) -> Self:
        faults = list(self._faults())
        if faults:
            raise FaultsError(faults)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes and on as true, which would pass for a 1.
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and "bool" not in annotation:
            raise ValueError(f"got {str(value).lower()}, wanted a value, not a switch")
        if any("\0" in text for text in _strings(value)):
            raise ValueError(f"got {shown(value)}, which holds a NUL, as no path or name does")
        return value


def _strings(value: Any) -> Iterator[str]:
    """Those in a value of a setting: itself, a list's, a mapping's keys and values."""
    parts = [value]
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    yield from (part for part in parts if isinstance(part, str))


def literal(text: str) -> str:
    """``text`` as part of a fault's text, where braces are places for names."""
    return text.replace("{", "{{").replace("}", "}}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
