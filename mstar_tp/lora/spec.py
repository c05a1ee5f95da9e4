"""What adapters may touch: targets, limits and what a request asks for. No torch.

Plain data, equal on every rank; the frontend and the checker use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal

from mstar_tp.distributed.shard import OutSlice, shard_range, vocab_part
from mstar_tp.errors import ConfigError
from mstar_tp.wire.messages import AdapterKey

ZERO_SLOT = 0
"""The zero adapter: rank 0, never handed out, never written. Base rows address it and deltas skip
it.
"""


DEFAULT_SAVED_ROWS = 64
"""Rows of the vocabulary that an adapter may replace: room for some trained special tokens."""


class LoraParallel(Enum):
    """How a target is split.

    COLUMN: A whole, B's rows dealt. ROW: A's columns dealt, B whole. VOCAB_IN, an embedding: A's
    columns, one a token id, dealt as the vocabulary is, B whole. VOCAB_OUT, a head: A whole, B's
    rows dealt as the vocabulary is, padding as zero rows. NORM: no factors; an adapter replaces
    its weight, which every rank holds whole.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB_IN = "vocab_in"
    VOCAB_OUT = "vocab_out"
    NORM = "norm"

    @property
    def is_vocab(self) -> bool:
        return self in (LoraParallel.VOCAB_IN, LoraParallel.VOCAB_OUT)

    @property
    def is_linear(self) -> bool:
        return self in (LoraParallel.COLUMN, LoraParallel.ROW)


class RowGrouping(Enum):
    """Which rows a target's module sees. TOKENS: every token of the step, in its order. SAMPLED:
    one row for each of the step's rows that samples, in their order.
    """

    TOKENS = "tokens"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """One module that adapters may change, over a stack of like layers or (``stack`` empty) alone.

    The checkpoint names slice s of layer n ``{stack}.{n}.{parent}.{s.name}``, outside a stack
    ``{parent}.{s.name}``. ``name`` is the module's own path there: where it has several slices,
    adapters that were trained on the fused linear use it. ``in_features`` and ``out_slices`` are
    full sizes; ``in_units`` equal blocks of the input are dealt to the ranks of a row-parallel
    target. ``tied``: a head whose base weight is the embedding's.
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
    tied: bool = False

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.out_slices)

    @property
    def vocab_size(self) -> int:
        """Of an embedding or a head."""
        return self.in_features if self.parallel is LoraParallel.VOCAB_IN else self.out_features

    @property
    def hidden_size(self) -> int:
        """Of an embedding's or a head's weight: the size of a token's row."""
        return self.out_features if self.parallel is LoraParallel.VOCAB_IN else self.in_features

    def module(self, layer: int, slice_index: int) -> str:
        """The checkpoint's name of one slice of one layer, without a tensor's ending."""
        name = self.out_slices[slice_index].name
        path = f"{self.parent}.{name}" if self.parent else name
        return f"{self.stack}.{layer}.{path}" if self.stack else path

    def in_range(self, rank: int, world_size: int) -> range:
        """The input features, so columns of A, that ``rank`` holds."""
        if self.parallel is LoraParallel.VOCAB_IN:
            return vocab_part(self.in_features, rank, world_size)[1]
        if self.parallel is not LoraParallel.ROW:
            return range(self.in_features)
        return shard_range(self.in_features, self.in_units, rank, world_size, what=self.name)

    def out_ranges(self, rank: int, world_size: int) -> tuple[range, ...]:
        """For each slice, the rows of its B that ``rank`` holds: the base weight's own rows."""
        if self.parallel is LoraParallel.VOCAB_OUT:
            return (vocab_part(self.out_features, rank, world_size)[1],)
        if self.parallel is not LoraParallel.COLUMN:
            return tuple(range(part.out_features) for part in self.out_slices)
        return tuple(part.rows(rank, world_size) for part in self.out_slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """What one pool serves: its targets, its limits and the adapters it starts with.

    ``dtype`` is torch's name of the slots' dtype. ``adapters`` is (name, folder) in config order.
    ``cpu_capacity`` bounds what the host tier holds: a number of adapters, or of bytes on the rank
    with the most, by ``cpu_unit``.
    ``max_saved_rows`` rows of the embedding and of the head can be replaced by an adapter.
    """

    targets: tuple[LoraTarget, ...]
    slots: int
    max_rank: int
    cpu_capacity: int
    dtype: str
    cpu_unit: Literal["adapters", "bytes"] = "adapters"
    adapters: tuple[tuple[str, str], ...] = ()
    max_saved_rows: int = DEFAULT_SAVED_ROWS

    def __post_init__(self) -> None:
        for name in ("slots", "max_rank", "cpu_capacity"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"lora.{name} is {value!r}, wanted a whole number of at least 1")
        if type(self.max_saved_rows) is not int or self.max_saved_rows < 0:
            raise ConfigError(
                f"lora.max_saved_rows is {self.max_saved_rows!r}, wanted a whole number"
            )
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

    def places(self) -> dict[tuple[str, str], tuple[LoraTarget, tuple[int, ...]]]:
        """(stack, path within a layer) of every module and of every fused linear -> (target, the
        slices of its output that it stands for).
        """
        found: dict[tuple[str, str], tuple[LoraTarget, tuple[int, ...]]] = {}

        def add(target: LoraTarget, path: str, slices: tuple[int, ...]) -> None:
            assert (target.stack, path) not in found, f"two targets place {target.stack}.*.{path}"
            found[target.stack, path] = (target, slices)

        for target in self.targets:
            for index, part in enumerate(target.out_slices):
                add(
                    target, f"{target.parent}.{part.name}" if target.parent else part.name, (index,)
                )
            if len(target.out_slices) > 1:
                add(target, target.name, tuple(range(len(target.out_slices))))
        return found


@dataclass(frozen=True, slots=True)
class LoraReqConfig:
    """What a request's ingest carries: an adapter key, or None for the base model."""

    adapter: AdapterKey | None
