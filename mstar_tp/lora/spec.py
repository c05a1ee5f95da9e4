"""What adapters may touch: targets, limits and what a request asks for. No torch.

Plain data, equal on every rank; the frontend and the checker use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from mstar_tp.distributed.shard import OutSlice, shard_range
from mstar_tp.errors import ConfigError
from mstar_tp.wire.messages import AdapterKey

ZERO_SLOT = 0
"""The zero adapter: rank 0, never handed out, never written. Base rows address it and deltas skip
it.
"""


class LoraParallel(Enum):
    """How a target is split: column (A whole, B's rows dealt) or row (A's columns dealt, B
    whole).
    """

    COLUMN = "column"
    ROW = "row"


class RowGrouping(Enum):
    """Which rows a target's linear sees. TOKENS: every token of the step, in its order."""

    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """One linear that adapters may change, over a stack of like layers.

    The checkpoint names slice s of layer n ``{stack}.{n}.{parent}.{s.name}``. ``in_features`` and
    ``out_slices`` are full sizes; ``in_units`` equal blocks of the input are dealt to the ranks of
    a row-parallel target.
    """

    name: str
    stack: str
    num_layers: int
    parent: str
    in_features: int
    out_slices: tuple[OutSlice, ...]
    parallel: LoraParallel
    in_units: int
    row_grouping: RowGrouping = RowGrouping.TOKENS

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.out_slices)

    def module(self, layer: int, slice_index: int) -> str:
        """The checkpoint's name of one slice of one layer, without a tensor's ending."""
        name = self.out_slices[slice_index].name
        path = f"{self.parent}.{name}" if self.parent else name
        return f"{self.stack}.{layer}.{path}"

    def in_range(self, rank: int, world_size: int) -> range:
        """The input features, so columns of A, that ``rank`` holds."""
        if self.parallel is LoraParallel.COLUMN:
            return range(self.in_features)
        return shard_range(self.in_features, self.in_units, rank, world_size, what=self.name)

    def out_ranges(self, rank: int, world_size: int) -> tuple[range, ...]:
        """For each slice, the rows of its B that ``rank`` holds: the base weight's own rows."""
        if self.parallel is LoraParallel.ROW:
            return tuple(range(part.out_features) for part in self.out_slices)
        return tuple(part.rows(rank, world_size) for part in self.out_slices)


class SlicePlace(NamedTuple):
    """Where a checkpoint module's delta goes: target, layer of its stack, slice of its output."""

    target: LoraTarget
    layer: int
    slice_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """What one pool serves: its targets, its limits and the adapters it starts with.

    ``dtype`` is torch's name of the slots' dtype. ``adapters`` is (name, folder) in config order.
    ``cpu_capacity`` bounds what the host tier holds: a number of adapters, or of bytes on the rank
    with the most, by ``cpu_unit``.
    """

    targets: tuple[LoraTarget, ...]
    slots: int
    max_rank: int
    cpu_capacity: int
    dtype: str
    cpu_unit: Literal["adapters", "bytes"] = "adapters"
    adapters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("slots", "max_rank", "cpu_capacity"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"lora.{name} is {value!r}, wanted a whole number of at least 1")
        if self.cpu_unit not in ("adapters", "bytes"):
            raise ConfigError(f"lora.cpu_unit is {self.cpu_unit!r}, wanted adapters or bytes")
        if self.cpu_unit == "adapters" and self.cpu_capacity < self.slots:
            raise ConfigError(
                f"lora.cpu_capacity is {self.cpu_capacity}, wanted at least lora.slots = "
                f"{self.slots}: "
                "every slot's adapter needs a place in the host tier"
            )

    def apply_yaml_overrides(self, overrides: Mapping[str, Any]) -> LoraSpec:
        """A spec with ``overrides`` in place; this one stays as declared.

        Raises:
            ConfigError: an unknown key (naming those there are) or a value out of range.
        """
        known = [f.name for f in fields(self) if f.name != "targets"]
        for key in overrides:
            if key not in known:
                raise ConfigError(f"lora.{key} is no option: there are {', '.join(known)}")
        return replace(self, **overrides)

    def layer_counts(self) -> dict[str, int]:
        """Stack name -> its number of layers."""
        return {target.stack: target.num_layers for target in self.targets}

    def places(self) -> dict[tuple[str, str], tuple[LoraTarget, int]]:
        """(stack, path of a slice within a layer) -> (target, slice index)."""
        found: dict[tuple[str, str], tuple[LoraTarget, int]] = {}
        for target in self.targets:
            for index, part in enumerate(target.out_slices):
                path = f"{target.parent}.{part.name}" if target.parent else part.name
                assert (target.stack, path) not in found, (
                    f"two targets place {target.stack}.*.{path}"
                )
                found[target.stack, path] = (target, index)
        return found


@dataclass(frozen=True, slots=True)
class LoraReqConfig:
    """What a request's ingest carries: an adapter key, or None for the base model."""

    adapter: AdapterKey | None
