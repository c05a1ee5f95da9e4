"""The section ``engine.lora``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, field_validator

from mstar_tp.config.limits import LimitsConfig
from mstar_tp.config.section import Fault, Positive, Section, literal, shown

MAX_ADAPTER_NAME_CHARS = 256


def adapter_name_fault(name: str) -> str | None:
    """Why no adapter can be called ``name``, in words that follow the name of the setting."""
    parts = name.split("/")
    if (
        0 < len(name) <= MAX_ADAPTER_NAME_CHARS
        and name.isprintable()
        and not any(part in ("", ".", "..") for part in parts)
        and "\\" not in name
    ):
        return None
    return (
        f"must be 1 to {MAX_ADAPTER_NAME_CHARS} printable characters, not start or end with '/', "
        "and hold no '..' or backslash"
    )


class LoraConfig(Section):
    """Adapters and the two tiers that hold them."""

    adapters: dict[str, str] = Field(default_factory=dict)
    """Adapters served from the start, in this order: name and folder (or file) of each."""
    max_loras: Positive = 8
    """Device slots: how many distinct adapters can be in one batch."""
    max_lora_rank: Positive = 16
    """Highest rank served. Every slot has memory for it; smaller ranks are padded."""
    max_lora_saved_rows: Annotated[int, Field(ge=0)] = 64
    """Rows of the embedding, and of the head, that an adapter may replace (trained tokens, whole
    matrices); every slot has memory for as many."""
    max_cpu_loras: Positive | None = None
    """Adapters in each rank's CPU cache, at least ``max_loras``; unset: twice ``max_loras``.

    On a model that reads images, slots and CPU cache are there twice, each with these bounds.
    """
    max_cpu_lora_bytes: Positive | None = None
    """The CPU cache's bound in bytes of each rank's memory, instead of a number of adapters; an
    adapter counts with the bytes of its largest shard."""
    roots: tuple[str, ...] = ()
    """Folders that runtime loads may read from; without one they are refused."""
    adapters_root: str | None = None
    """Folder whose subfolders are adapters, each named by its path in it.

    Runtime loads may read from it too.
    """
    on_demand: bool = False
    """Whether a request may name any adapter in ``adapters_root``, which is checked, loaded and
    served then."""
    max_on_demand: Positive = 1000
    """Adapters loaded on demand that stay served; past that, those go that were unused for
    longest."""
    exclude: tuple[str, ...] = ()
    """Regular expressions of modules that no adapter may change, by path or by path within a layer:
    ``.*\\.experts\\..*`` leaves a mixture's experts out. An adapter that changes one is refused,
    and slots have no memory for them."""

    limits: dict[str, LimitsConfig] = Field(default_factory=dict)
    """What single adapters may take, by name: ``pinned``, ``weight``, ``max_rows``,
    ``max_queued``. They hold for an adapter of that name that is loaded later, too."""
    default_limits: LimitsConfig = LimitsConfig()
    """The same for adapters and settings that ``limits`` leaves out; it pins nobody."""
    base_limits: LimitsConfig = LimitsConfig()
    """The same for the base model, which counts as one adapter and is never pinned."""

    @field_validator("exclude")
    @classmethod
    def _expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @property
    def host_capacity(self) -> int:
        """The CPU cache's bound: bytes where max_cpu_lora_bytes is given, else adapters."""
        return self.max_cpu_lora_bytes or self.max_cpu_loras or 2 * self.max_loras

    @property
    def all_roots(self) -> tuple[str, ...]:
        """The folders that runtime loads may read from."""
        return (*self.roots, *(() if self.adapters_root is None else (self.adapters_root,)))

    def real_roots(self) -> tuple[str, ...]:
        """Those folders, with symlinks resolved as they are on this machine now."""
        return tuple(os.path.realpath(root) for root in self.all_roots)

    def limits_of(self, name: str | None) -> LimitsConfig:
        """Return what an adapter may take; None: the base model."""
        if name is None:
            return self.base_limits
        return self.limits.get(name, LimitsConfig()).over(self.default_limits)

    def _faults(self) -> Iterator[Fault]:
        yield from self._limit_faults()
        if self.on_demand and not self.adapters_root:
            yield Fault(
                "{} is true, and {} names no folder to load from", ("on_demand", "adapters_root")
            )
        if self.max_cpu_loras is not None and self.max_cpu_lora_bytes is not None:
            yield Fault(
                f"{{}} is {self.max_cpu_loras} and {{}} is {self.max_cpu_lora_bytes}: "
                "give one of the two bounds",
                ("max_cpu_loras", "max_cpu_lora_bytes"),
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield Fault(
                f"{{}} is {self.max_cpu_loras}, wanted at least {{}} = {self.max_loras}",
                ("max_cpu_loras", "max_loras"),
            )
        for name, path in self.adapters.items():
            fault = adapter_name_fault(name)
            if not name or not path:
                entry = literal(f"{name!r}: {path!r}")
                yield Fault(f"{{}}: {entry} needs a name and a path", ("adapters",), (name,))
            elif fault is not None:
                yield Fault(
                    f"{{}}: the name {literal(shown(name))} {fault}", ("adapters",), (name,)
                )

    def _limit_faults(self) -> Iterator[Fault]:
        for key, limits in (
            ("default_limits", self.default_limits),
            ("base_limits", self.base_limits),
        ):
            if limits.pinned:
                yield Fault("{}: pinned is for single adapters, in limits", (key,))
        for name in self.limits:
            if (fault := adapter_name_fault(name)) is not None:
                yield Fault(f"{{}}: the name {literal(shown(name))} {fault}", ("limits",), (name,))
        pinned = sum(bool(self.limits_of(name).pinned) for name in self.adapters)
        if pinned >= self.max_loras:
            yield Fault(
                f"{{}}: {pinned} adapters are pinned, wanted fewer than {{}} = {self.max_loras}: "
                "one slot must be left for the others",
                ("limits", "max_loras"),
            )
