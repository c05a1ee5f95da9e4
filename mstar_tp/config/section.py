"""The base of the configuration's sections: frozen, strict, and complete in what they refuse.

A field's flag is told by the ``Flag`` in its annotation; its default is the field's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MAX_INT = 2**63 - 1
"""The largest number that messages to ranks, tensors and the kernel can all hold."""

Positive = Annotated[int, Field(gt=0, le=MAX_INT)]

Group = Literal["model", "adapters", "memory", "scheduling", "API", "logging"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The parts of ``--help``, in its order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The command line's side of a setting, kept in the annotation of its field."""

    group: Group
    """The part of ``--help`` that lists the flag."""
    help: str
    """The short text that help shows, without the default."""
    value: str = "N"
    """The name that help gives the value."""
    name: str | None = None
    """The flag's spelling where it is not the field's name with dashes."""
    unset: str | None = None
    """The default in words, where the field's value does not say it."""
    note: str = ""
    """Text that help adds right behind the default."""


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
        """The path of what is at fault, within the section. An entry's name may hold dots."""
        return (*self.keys[0].split("."), *self.entry)


class FaultsError(ValueError):
    """All faults of a section at once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.text.format(*fault.keys) for fault in faults))
        self.faults = tuple(faults)


class Section(BaseModel):
    """A frozen part of the configuration, which refuses keys that it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def _faults(self) -> Iterator[Fault]:
        """Yield the faults of values that are right alone and wrong together."""
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
    """The strings in a setting's value: itself, a list's, a mapping's keys and values."""
    parts = [value]
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    yield from (part for part in parts if isinstance(part, str))


def literal(text: str) -> str:
    """``text`` escaped for a fault's text, where braces are places for names."""
    return text.replace("{", "{{").replace("}", "}}")


def shown(value: Any) -> str:
    """``value`` as a message shows it, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
