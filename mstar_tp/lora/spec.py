"""The targets and limits of adapters, and a request's choice of one. No torch.

Plain data, equal on every rank; the frontend and the checker use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.module_names import AS_BUILT, CheckpointRules, join_words
from mstar_tp.distributed.shard import OutSlice, shard_range, vocab_part
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.wire.values import AdapterKey

ZERO_SLOT = 0
"""The zero adapter's slot: its rank is 0, and it is never handed out and never written.

Base rows address it and deltas skip it.
"""


DEFAULT_SAVED_ROWS = 64
"""Rows of the vocabulary that an adapter may replace: room for some trained special tokens."""


class LoraParallel(Enum):
    """The way a target is split.

    COLUMN: A whole, B's rows dealt. ROW: A's columns dealt, B whole. VOCAB_IN, an embedding: A's
    columns, one a token id, dealt as the vocabulary is, B whole. VOCAB_OUT, a head: A whole, B's
    rows dealt as the vocabulary is, padding as zero rows. NORM: no factors; an adapter replaces
    its weight, which every rank holds whole. REPLICATED: A and B whole on every rank, for a linear
    or a patch convolution that no rank splits.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB_IN = "vocab_in"
    VOCAB_OUT = "vocab_out"
    NORM = "norm"
    REPLICATED = "replicated"

    @property
    def is_vocab(self) -> bool:
        return self in (LoraParallel.VOCAB_IN, LoraParallel.VOCAB_OUT)

    @property
    def is_linear(self) -> bool:
        return self in (LoraParallel.COLUMN, LoraParallel.ROW, LoraParallel.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """One module that adapters may change, over a stack of like layers or (``stack`` empty) alone.

    The checkpoint names slice s of layer n ``{stack}.{n}.{parent}.{s.name}``, outside a stack
    ``{parent}.{s.name}``; parts that are empty are left out. ``name`` tells the target from others,
    in settings too; it is also the module's own path there, unless ``path`` says another: where it
    has several slices, adapters that were trained on the fused linear use that. ``in_features`` and
    ``out_slices`` are full sizes; ``in_units`` equal blocks of the input are dealt to the ranks of
    a row-parallel target. ``tied``: a head whose base weight is the embedding's. ``conv``: of a
    convolution whose kernel equals its stride, (channels, *kernel); ``in_features`` is the product.
    ``routed``: the layers are the experts of one layer of the model, each of which sees the tokens
    that a router sends it; ``path`` is then also what the stacked parameter of all is called.
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
    conv: tuple[int, ...] = ()
    routed: bool = False
    path: str | None = None

    @property
    def own_path(self) -> str:
        """The module's path in the checkpoint, within a layer of its stack."""
        return self.name if self.path is None else self.path

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape of one output's row of the base weight."""
        return self.conv or (self.in_features,)

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of A in an adapter file, of a linear or a convolution."""
        return (rank, *self.base_shape)

    def b_shape(self, out_features: int, rank: int) -> tuple[int, ...]:
        """The shape of B in an adapter file; a convolution's is one of 1 x 1."""
        return (out_features, rank, *(1 for _ in self.conv[1:]))

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.out_slices)

    @property
    def vocab_size(self) -> int:
        """The vocabulary's size of an embedding or a head."""
        return self.in_features if self.parallel is LoraParallel.VOCAB_IN else self.out_features

    @property
    def hidden_size(self) -> int:
        """The size of a token's row in an embedding's or a head's weight."""
        return self.out_features if self.parallel is LoraParallel.VOCAB_IN else self.in_features

    def module(self, layer: int, slice_index: int) -> str:
        """The checkpoint's name of one slice of one layer, without a tensor's ending."""
        return self.named(layer, self.path_of(slice_index))

    def path_of(self, slice_index: int) -> str:
        """The checkpoint's path of one slice within a layer."""
        return join_words((self.parent, self.out_slices[slice_index].name))

    def named(self, layer: int, path: str) -> str:
        """The checkpoint's name of ``path`` in one layer."""
        return join_words((self.stack, str(layer), path)) if self.stack else path

    def in_range(self, rank: int, world_size: int) -> range:
        """The input features, so columns of A, that ``rank`` holds."""
        if self.parallel is LoraParallel.VOCAB_IN:
            return vocab_part(self.in_features, rank, world_size)[1]
        if self.parallel is not LoraParallel.ROW:
            return range(self.in_features)
        return shard_range(self.in_features, self.in_units, rank, world_size, what=self.name)

    def out_ranges(self, rank: int, world_size: int) -> tuple[range, ...]:
        """The rows of each slice's B that ``rank`` holds: the base weight's own rows."""
        if self.parallel is LoraParallel.VOCAB_OUT:
            return (vocab_part(self.out_features, rank, world_size)[1],)
        if self.parallel is not LoraParallel.COLUMN:
            return tuple(range(part.out_features) for part in self.out_slices)
        return tuple(part.rows(rank, world_size) for part in self.out_slices)


_WALKED = frozenset({"targets", "sites", "unservable", "module_map"})
"""Fields that the model's own modules set, and no option does."""


class LoraSite(NamedTuple):
    """One module that adapters may change: its path in the stage, and what it is there.

    ``deferred`` ones are bound later than the others, by the model.
    """

    path: str
    target: str
    layer: int


class Unservable(NamedTuple):
    """A module, by name, that no adapter may change, nor anything under it: why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The targets of one pool, its limits and the adapters it starts with.

    The walk over a stage's modules makes it, and says in ``sites`` where each target's modules
    stand, in ``unservable`` which of the stage's modules adapters may not change, and in
    ``module_map`` how files spell them otherwise.

    ``dtype`` is torch's name of the slots' dtype. ``adapters`` is (name, folder) in config order.
    ``cpu_capacity`` bounds what the CPU cache holds: a number of adapters, or of bytes on the rank
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
    sites: tuple[LoraSite, ...] = ()
    unservable: tuple[Unservable, ...] = ()
    module_map: CheckpointRules = AS_BUILT

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
                "every slot's adapter needs a place in the CPU cache"
            )

    def apply_yaml_overrides(self, overrides: Mapping[str, Any]) -> LoraSpec:
        """A spec with ``overrides`` in place; this one stays as declared.

        Raises:
            ConfigError: an unknown key (naming those there are) or a value out of range.
        """
        known = [f.name for f in fields(self) if f.name not in _WALKED]
        for key in overrides:
            if key not in known:
                raise ConfigError(f"lora.{key} is no option: there are {', '.join(known)}")
        return replace(self, **overrides)

    def layer_counts(self) -> dict[str, int]:
        """Stack name -> its number of layers."""
        return {target.stack: target.num_layers for target in self.targets}

    def places(self) -> dict[tuple[str, str], tuple[LoraTarget, tuple[int, ...]]]:
        """Places of modules and fused linears: (stack, path in a layer) -> (target, slices).

        The slices are those of the target's output that the module stands for.
        """
        found: dict[tuple[str, str], tuple[LoraTarget, tuple[int, ...]]] = {}

        def add(target: LoraTarget, path: str, slices: tuple[int, ...]) -> None:
            assert (target.stack, path) not in found, f"two targets place {target.stack}.*.{path}"
            found[target.stack, path] = (target, slices)

        for target in self.targets:
            for index in range(len(target.out_slices)):
                add(target, target.path_of(index), (index,))
            if len(target.out_slices) > 1:
                add(target, target.own_path, tuple(range(len(target.out_slices))))
        return found


@dataclass(frozen=True, slots=True)
class LoraReqConfig:
    """The adapter of a request (None: the base model), and whether its prompt holds images."""

    adapter: AdapterKey | None
    has_images: bool = False
