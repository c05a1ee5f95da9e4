"""The section ``engine.lora``: adapters, and the bounds on what they take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, field_validator

from mstar_tp.config.limits import LimitsConfig
from mstar_tp.config.section import Fault, Flag, Positive, Section, literal, shown

MAX_ADAPTER_NAME_CHARS = 256


def adapter_name_fault(name: str) -> str | None:
    """The reason why no adapter can be called ``name``, or None.

    It is worded to follow the name of the setting.
    """
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
    """Adapters, the device slots and the CPU cache that hold them, and their limits."""

    adapters: Annotated[
        dict[str, str],
        Flag(
            "adapters",
            "name=path of an adapter to serve; repeatable",
            value="NAME=PATH",
            name="--lora",
        ),
    ] = Field(default_factory=dict)
    """Adapters served from the start, in this order: name and folder (or file) of each."""
    max_loras: Annotated[Positive, Flag("adapters", "distinct adapters in one batch")] = 8
    """Device slots: how many distinct adapters can be in one batch."""
    max_lora_rank: Annotated[Positive, Flag("adapters", "highest adapter rank")] = 16
    """Highest rank served. Every slot has memory for it; smaller ranks are padded."""
    max_lora_saved_rows: Annotated[
        int,
        Field(ge=0),
        Flag("adapters", "vocabulary rows that an adapter may replace, held in every slot"),
    ] = 64
    """Rows of the embedding, and of the head, that an adapter may replace.

    They are trained tokens, or whole matrices; every slot has memory for as many."""
    max_cpu_loras: Annotated[
        Positive | None,
        Flag("adapters", "adapters in each rank's host memory", unset="twice max-loras"),
    ] = None
    """Adapters in each rank's CPU cache, at least ``max_loras``; unset: twice ``max_loras``.

    On a model that reads images, slots and CPU cache are there twice, each with these bounds."""
    max_cpu_lora_bytes: Annotated[
        Positive | None,
        Flag(
            "adapters",
            "bytes of adapters in each rank's host memory, instead of a number of adapters",
            value="BYTES",
        ),
    ] = None
    """Bytes of each rank's CPU cache, instead of a number of adapters.

    An adapter counts with the bytes of its largest shard."""
    roots: Annotated[
        tuple[str, ...],
        Flag(
            "adapters",
            "folder that runtime loads may read from; repeatable",
            value="FOLDER",
            name="--lora-root",
            unset="none, so no runtime loads",
        ),
    ] = ()
    """Folders that runtime loads may read from; without one they are refused."""
    adapters_root: Annotated[
        str | None,
        Flag(
            "adapters",
            "folder whose subfolders are adapters, named by their paths in it",
            value="FOLDER",
            unset="none",
        ),
    ] = None
    """Folder whose subfolders are adapters, each named by its path in it.

    Runtime loads may read from it too."""
    on_demand: Annotated[
        bool, Flag("adapters", "let requests name any adapter in adapters-root: it is loaded then")
    ] = False
    """Let requests name any adapter in ``adapters_root``.

    It is checked, loaded and served then."""
    max_on_demand: Annotated[
        Positive, Flag("adapters", "adapters loaded on demand that stay served")
    ] = 1000
    """Adapters loaded on demand that stay served.

    Past that, those go that were unused for longest."""
    exclude: Annotated[
        tuple[str, ...],
        Flag(
            "adapters",
            "regular expression of modules that no adapter may change; slots need no "
            "memory for them",
            value="PATTERN",
            name="--lora-exclude",
        ),
    ] = ()
    """Regular expressions of modules that no adapter may change.

    They match a module's path, or its path within a layer: ``.*\\.experts\\..*`` leaves a mixture's
    experts out. An adapter that changes one is refused, and slots have no memory for them."""

    limits: Annotated[
        dict[str, LimitsConfig],
        Flag(
            "adapters",
            "what an adapter may take: name=pinned,weight=W,max_rows=N,max_queued=N, any "
            "of these; repeatable",
            value="NAME=LIMITS",
            name="--lora-limits",
        ),
    ] = Field(default_factory=dict)
    """The limits of single adapters: ``pinned``, ``weight``, ``max_rows``, ``max_queued``.

    They hold for an adapter of that name that is loaded later, too."""
    default_limits: Annotated[
        LimitsConfig,
        Flag(
            "adapters",
            "what adapters may take that have no limits of their own: "
            "weight=W,max_rows=N,max_queued=N",
            value="LIMITS",
            name="--lora-default-limits",
        ),
    ] = LimitsConfig()
    """The same for adapters and settings that ``limits`` leaves out; it pins nobody."""
    base_limits: Annotated[
        LimitsConfig,
        Flag(
            "adapters",
            "what the base model may take beside adapters: weight=W,max_rows=N,max_queued=N",
            value="LIMITS",
            name="--lora-base-limits",
        ),
    ] = LimitsConfig()
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
        """The limits of an adapter; None: of the base model."""
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
