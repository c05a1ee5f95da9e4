"""Merged rows of one base tensor: read by range, changed in float32, never whole in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.adapter_files import StoredTensor, identify, open_file, take_part
from mstar_tp.tensor_files.reader import TensorFile
from mstar_tp.tools.merge.plan import Bias, Change, Product, Replacement, WeightedAdapter

PART_ELEMENTS = 8 << 20
"""Elements of a base tensor that are merged at a time: 32 MB in float32."""
_MAX_KEPT = 4
"""Both factors of both linears of a layer's stacked experts."""


def row_parts(shape: Sequence[int]) -> list[range]:
    """The rows of a tensor in parts of about ``PART_ELEMENTS``."""
    step = max(1, PART_ELEMENTS // max(1, math.prod(shape[1:])))
    return [range(i, min(i + step, shape[0])) for i in range(0, shape[0], step)]


class AdapterTensors:
    """The open files of the adapters that are merged. Tensors come in float32, as matrices."""

    def __init__(self, adapters: Sequence[WeightedAdapter]) -> None:
        self._adapters = adapters
        self._stack = ExitStack()
        self._files: list[list[TensorFile]] = []
        self._kept: dict[tuple[int, StoredTensor], torch.Tensor] = {}

    def __enter__(self) -> Self:
        with self._stack:
            for file, _ in self._adapters:
                opened = [self._stack.enter_context(open_file(part)) for part in file.files]
                self._files.append(opened)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def file(self, adapter: int, tensor: StoredTensor) -> TensorFile:
        return self._files[adapter][tensor.file]

    def rows(self, adapter: int, tensor: StoredTensor, rows: range) -> torch.Tensor:
        """Rows of the first dim, later dims in one: [rows, ...]."""
        if tensor.part is not None:
            stacked = take_part(self._stacked(adapter, tensor.whole), tensor.part)
            return stacked[rows.start : rows.stop].float()
        part = self.file(adapter, tensor).read_rows(tensor.key, rows).float()
        return part if part.dim() < 2 else part.flatten(1)

    def _stacked(self, adapter: int, tensor: StoredTensor) -> torch.Tensor:
        """A tensor of stacked experts; the last few are kept, for every expert has a part."""
        place = adapter, tensor
        if place not in self._kept:
            if len(self._kept) == _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[place] = self.file(adapter, tensor).read(tensor.key)
        return self._kept[place]

    def whole(self, adapter: int, tensor: StoredTensor) -> torch.Tensor:
        return self.rows(adapter, tensor, range(tensor.info.shape[0]))

    def columns(self, adapter: int, tensor: StoredTensor, columns: range) -> torch.Tensor:
        if len(tensor.info.shape) != 2 or tensor.part is not None:
            return self.whole(adapter, tensor)[:, columns.start : columns.stop]
        return self.file(adapter, tensor).read_columns(tensor.key, columns).float()

    def check_finite(self) -> None:
        """Read every tensor once.

        Raises:
            AdapterError: one holds a number that is not finite; adapter, file and key are named.
        """
        for number, (file, _) in enumerate(self._adapters):
            factors = [t for m in file.modules for t in (m.a, m.b, m.bias) if t is not None]
            rows_of = [saved.tensor for saved in file.rows]
            norms = [saved.tensor for saved in file.norms]
            for tensor in dict.fromkeys(t.whole for t in (*factors, *rows_of, *norms)):
                for rows in row_parts(tensor.info.shape):
                    if not self.rows(number, tensor, rows).isfinite().all():
                        raise AdapterError(
                            f"adapter {file.adapter!r}: {self.file(number, tensor).path}: "
                            f"{tensor.key} holds values that are not finite (NaN or Inf)"
                        )

    def check_unchanged(self) -> None:
        """Raises AdapterError: a file was written to since the adapters were checked."""
        for file, _ in self._adapters:
            for part in file.files:
                if identify(part.path) != part.identity:
                    raise AdapterError(
                        f"adapter {file.adapter!r}: {part.path} was changed while it was merged: "
                        "merge again once it is whole"
                    )

    def equal(self, adapter: int, one: StoredTensor, other: StoredTensor) -> bool:
        """True if two tensors of an adapter hold the same values."""
        if one.info.shape != other.info.shape:
            return False
        return all(
            torch.equal(self.rows(adapter, one, rows), self.rows(adapter, other, rows))
            for rows in row_parts(one.info.shape)
        )


def merged_rows(
    base: torch.Tensor, rows: range, changes: Sequence[Change], tensors: AdapterTensors
) -> torch.Tensor:
    """The base's rows ``rows`` with all changes, later dims in one.

    ``base`` is [rows, ...] of any float dtype; the result is in float32, or float64 if the base is.
    """
    before = base if base.dtype == torch.float64 else base.float()
    before = before if before.dim() < 2 else before.flatten(1)
    merged = before.clone()
    for number, change in enumerate(changes):
        if isinstance(change, Product):
            _add_product(merged, rows, change, tensors)
        elif isinstance(change, Bias):
            first = change.rows.start
            part = range(first + rows.start, first + rows.stop)
            merged += tensors.rows(change.adapter, change.tensor, part) * change.scale
        else:
            _replace(merged, before, rows, change, tensors, exact=number == 0)
    return merged


def _add_product(
    merged: torch.Tensor, rows: range, change: Product, tensors: AdapterTensors
) -> None:
    """Add the delta's part that falls into ``rows`` of the base tensor."""
    start = max(rows.start, change.first)
    stop = min(rows.stop, change.first + len(change.rows))
    if start < stop:
        shift = change.rows.start - change.first
        delta = _product(change, range(start + shift, stop + shift), tensors) * change.scale
        merged[start - rows.start : stop - rows.start] += delta


def _product(change: Product, rows: range, tensors: AdapterTensors) -> torch.Tensor:
    """Rows of the delta, unscaled, multiplied in the order in which PEFT does it."""
    adapter = change.adapter
    if change.table:
        return (tensors.whole(adapter, change.b) @ tensors.columns(adapter, change.a, rows)).t()
    if change.swapped:
        return tensors.columns(adapter, change.b, rows).t() @ tensors.whole(adapter, change.a).t()
    return tensors.rows(adapter, change.b, rows) @ tensors.whole(adapter, change.a)


def _replace(
    merged: torch.Tensor,
    before: torch.Tensor,
    rows: range,
    change: Replacement,
    tensors: AdapterTensors,
    *,
    exact: bool,
) -> None:
    """``exact``: nothing was added so far, so at weight 1 the new rows stand as they are."""
    here: slice | torch.Tensor
    if isinstance(change.ids, range):
        here, theirs = slice(None), tensors.rows(change.adapter, change.tensor, rows)
    else:
        found = [(token - rows.start, at) for at, token in enumerate(change.ids) if token in rows]
        if not found:
            return
        here = torch.tensor([token for token, _ in found])
        at = [tensors.rows(change.adapter, change.tensor, range(a, a + 1)) for _, a in found]
        theirs = torch.cat(at)
    if exact and change.weight == 1.0:
        merged[here] = theirs.to(merged.dtype)
    else:
        merged[here] += (theirs - before[here]) * change.weight
