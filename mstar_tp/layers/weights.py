"""The place where a layer's weights live, and the reader that it fills itself from.

A layer that owns weights is a ``Loadable``: it names its checkpoint keys itself, as parent module
path + slice name + ".weight" or ".bias", and asks the reader for this rank's part alone. Building a
layer allocates nothing; filling it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from mstar_tp.distributed.comm import CommGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of a layer's weights: the group they are split over, their dtype and device."""

    group: CommGroup
    dtype: torch.dtype
    device: torch.device


class MatrixPart(NamedTuple):
    """A part of a matrix: one of the two ranges is whole."""

    rows: range
    columns: range


class WeightReader(Protocol):
    """This rank's view of a checkpoint. Every read marks its key as taken.

    ``shape`` is the full tensor's shape that the layer wants; ``out`` is a contiguous CPU tensor of
    the part's shape, in the layer's dtype. Every method raises CheckpointError naming the key when
    it is absent or misshapen.
    """

    def has(self, key: str) -> bool:
        """Tell whether the checkpoint holds ``key``."""
        ...

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        """Read rows ``rows`` of the first dim into ``out``."""
        ...

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        """Read columns ``columns`` of the last of two dims into ``out``."""
        ...

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        """Read part of matrix ``index`` of a tensor of three dims into ``out``.

        The part is some rows and all columns, or all rows and some columns.
        """
        ...


@runtime_checkable
class Loadable(Protocol):
    """A module that fills its own weights."""

    def load(self, reader: WeightReader, parent: str) -> None:
        """Read this rank's part of each weight; ``parent`` is the holding module's path.

        Raises:
            CheckpointError: a key is absent or misshapen; the message names it.
        """
        ...


@runtime_checkable
class Packable(Protocol):
    """A module that lays its weights out for this device once they are loaded."""

    def pack(self) -> None:
        """Lay the weights out; called once, right after ``load``."""
        ...


def join(parent: str, name: str) -> str:
    """``parent.name``, or ``name`` at the root."""
    return f"{parent}.{name}" if parent else name
