"""Reading an adapter's tensors and keeping this rank's part of them, laid out like a device slot.

Runs on reader threads, holds no lock. Whole tensors pass through memory of our own one module at a
time; only the shard stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch

from mstar_tp.distributed.shard import vocab_part
from mstar_tp.errors import AdapterError
from mstar_tp.lora.adapter import LoadedAdapter, ReplacedNorms, ReplacedRows
from mstar_tp.lora.base_weights import BaseWeights, check_copy
from mstar_tp.lora.checkpoint import AdapterFile, AdapterModule, SavedNorm, SavedRows, readable
from mstar_tp.lora.digest import AdapterDigest
from mstar_tp.lora.files import StoredTensor, identify, open_file, take_part
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.tensor_file import TensorFile
from mstar_tp.wire.messages import AdapterKey

logger = logging.getLogger(__name__)

_SERIAL_ELEMENTS = (1 << 15) - 1
"""torch runs element-wise work and sums over fewer elements than 2 ** 15 on the calling thread."""


def read_adapter(
    spec: LoraSpec,
    key: AdapterKey,
    file: AdapterFile,
    *,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    pin: bool,
    digest: str | None = None,
    base: BaseWeights | None = None,
) -> LoadedAdapter:
    """This rank's shard of a checked adapter, in ``dtype``. Blocks on the disk.

    ``base`` answers what the base model's weights are, for a file that holds copies of them.

    Raises:
        AdapterError: a file has changed since it was checked, holds a number that is not finite (as
            stored or in ``dtype``) or another base weight than the model's, or the weights hash to
            another digest than ``digest``.
    """
    shard = _Shard(spec, file, rank, world_size, dtype, pin)
    hasher = AdapterDigest()
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open_file(part)) for part in file.files]
            reader = _Reader(files)
            for module in file.modules:
                a, b = reader.read(module.a), reader.read(module.b)
                bias = None if module.bias is None else reader.read(module.bias)
                hasher.add(module, _bytes(a), _bytes(b), None if bias is None else _bytes(bias))
                shard.add(module, a, b, bias)
            for saved in file.rows:
                rows = reader.read(saved.tensor)
                hasher.add_rows(saved, _bytes(rows))
                shard.replace(saved, rows)
            for norm in file.norms:
                weight = reader.read(norm.tensor)
                hasher.add_norm(norm, _bytes(weight))
                shard.replace_norm(norm, weight)
            for copy in file.copies:
                check_copy(copy, files[copy.tensor.file], base, rank, world_size)
            for part in file.files:
                if identify(part.path) != part.identity:
                    raise AdapterError(
                        f"{part.path} was changed while it was read: load it again under its name "
                        "once it is whole"
                    )
    except AdapterError as error:
        raise AdapterError(f"adapter {key.name!r}: {readable(str(error))}") from None
    found = hasher.hex()
    if digest is not None and found != digest:
        raise AdapterError(
            f"adapter {key.name!r}: {file.path} has digest {found}, but was served with "
            f"{digest}: load it again under its name"
        )
    if rank == 0 and not shard.has_effect:
        logger.warning("adapter %r has no effect: a factor of every pair is zero", key.name)
    return LoadedAdapter(
        key=key,
        digest=found,
        rank=file.rank,
        scaling={module.name: module.scaling for module in file.modules},
        a=shard.a,
        b=shard.b,
        bias=shard.bias,
        rows=shard.rows,
        norms=shard.norms,
    )


class _Reader:
    """Whole tensors of an adapter's open files, checked."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = files
        self._stacked: dict[tuple[int, str], torch.Tensor] = {}
        """The last two tensors of stacked experts, A and B: every expert has a part of them."""

    def read(self, stored: StoredTensor) -> torch.Tensor:
        if stored.part is None:
            return self._whole(stored)
        place = stored.file, stored.key
        if place not in self._stacked:
            if len(self._stacked) == 2:
                del self._stacked[next(iter(self._stacked))]
            self._stacked[place] = self._whole(stored)
        return take_part(self._stacked[place], stored.part)

    def _whole(self, stored: StoredTensor) -> torch.Tensor:
        file = self._files[stored.file]
        tensor = file.read(stored.key)
        matrix = tensor if tensor.dim() < 2 else tensor.flatten(1)
        _refuse_non_finite(matrix, f"{file.path}: {stored.key}")
        return matrix


class _Shard:
    """The host copy under construction."""

    def __init__(
        self,
        spec: LoraSpec,
        file: AdapterFile,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        pin: bool,
    ) -> None:
        self._max_rank = spec.max_rank
        self._rank, self._world_size = rank, world_size
        self._dtype, self._pin = dtype, pin
        self._paths = [part.path for part in file.files]
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.bias: dict[str, torch.Tensor] = {}
        self.rows: dict[str, ReplacedRows] = {}
        self.norms: dict[str, ReplacedNorms] = {}
        self.has_effect = False
        wanted = {module.place.target.name: module.place.target for module in file.modules}
        for name, target in wanted.items():
            a, b = slot_shapes(spec, target, rank, world_size)
            self.a[name] = _zeros(a, dtype, pin)
            self.b[name] = _zeros(b, dtype, pin)
        for module in file.modules:
            target = module.place.target
            if module.bias is not None and _adds_bias(target, self._rank):
                self.bias.setdefault(target.name, _zeros(self.b[target.name].shape[:2], dtype, pin))

    def add(
        self,
        module: AdapterModule,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> None:
        """Keep this rank's slices of one module's full factors."""
        if module.swapped:
            a_RI, b_OR = a_RI.t(), b_OR.t()
        target, layer, slices, _ = module.place
        columns = target.in_range(self._rank, self._world_size)
        out = target.out_ranges(self._rank, self._world_size)
        kept_a = self.a[target.name][layer]
        part_RI = a_RI[:, columns.start : columns.stop]
        start = 0
        for index in slices:
            rows, first = out[index], sum(len(part) for part in out[:index])
            if target.parallel is LoraParallel.VOCAB_IN:
                _copy_serially(kept_a[: len(columns), : module.rank], part_RI.t(), 1.0)
            else:
                a_first = index * self._max_rank
                _copy_serially(kept_a[a_first : a_first + module.rank], part_RI, 1.0)
            here = slice(start + rows.start, start + rows.stop)
            kept_b = self.b[target.name][layer, first : first + len(rows), : module.rank]
            _copy_serially(kept_b, b_OR[here], module.scaling)
            factor = module.a if module.swapped else module.b
            what = f"{self._named(factor)} times {module.scaling:g}"
            _refuse_non_finite(kept_b, what)
            if bias_O is not None and _adds_bias(target, self._rank):
                kept_bias = self.bias[target.name][layer, first : first + len(rows)]
                kept_bias.copy_(bias_O[here].float() * module.scaling)
                _refuse_non_finite(kept_bias, f"{what}, its bias,")
            start += target.out_slices[index].out_features
        if not self.has_effect:
            zero = not (_any(a_RI) and _any(b_OR)) and (bias_O is None or not _any(bias_O))
            self.has_effect = module.scaling != 0 and not zero

    def _named(self, stored: StoredTensor) -> str:
        """A tensor as this rank keeps it, for messages."""
        return f"{self._paths[stored.file]}: {stored.key} in {self._dtype}"

    def replace(self, saved: SavedRows, rows_ND: torch.Tensor) -> None:
        """Keep the rows that fall into this rank's part of the vocabulary."""
        self.has_effect = True
        target = saved.target
        part = _vocab_part(target, self._rank, self._world_size)
        mine = sorted((token, at) for at, token in enumerate(saved.ids) if token in part)
        weight = _zeros((len(mine), rows_ND.shape[1]), self._dtype, self._pin)
        for to, (_, at) in zip(weight, mine, strict=True):
            to.copy_(rows_ND[at])
        _refuse_non_finite(weight, self._named(saved.tensor))
        ids = torch.tensor([token - part.start for token, _ in mine], dtype=torch.int64)
        self.rows[target.name] = ReplacedRows(ids, weight)

    def replace_norm(self, saved: SavedNorm, weight_D: torch.Tensor) -> None:
        """Keep a norm's weight, whole on every rank."""
        self.has_effect = True
        target = saved.target
        if target.name not in self.norms:
            shape = (target.num_layers, target.in_features)
            self.norms[target.name] = ReplacedNorms((), _zeros(shape, self._dtype, self._pin))
        layers, kept = self.norms[target.name]
        kept[saved.layer].copy_(weight_D)
        _refuse_non_finite(kept[saved.layer], self._named(saved.tensor))
        self.norms[target.name] = ReplacedNorms((*layers, saved.layer), kept)


def slot_shapes(
    spec: LoraSpec, target: LoraTarget, rank: int, world_size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of one slot's A [layers, slices * max_rank, in] and B [layers, out, max_rank] on one
    rank; an embedding's A is [1, ids, max_rank]. Vocabularies count padded.
    """
    rows = sum(len(part) for part in target.out_ranges(rank, world_size))
    if target.parallel is LoraParallel.VOCAB_IN:
        ids, _ = vocab_part(target.vocab_size, rank, world_size)
        return (1, ids, spec.max_rank), (1, rows, spec.max_rank)
    if target.parallel is LoraParallel.VOCAB_OUT:
        rows, _ = vocab_part(target.vocab_size, rank, world_size)
    columns = len(target.in_range(rank, world_size))
    a = (target.num_layers, len(target.out_slices) * spec.max_rank, columns)
    return a, (target.num_layers, rows, spec.max_rank)


class Footprint(Protocol):
    """What a copy's size follows from: an AdapterFile, or what is kept of one."""

    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def biased(self) -> tuple[str, ...]: ...
    @property
    def saved_ids(self) -> tuple[tuple[str, Sequence[int]], ...]: ...


def shard_bytes(
    spec: LoraSpec, adapter: Footprint, rank: int, world_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one rank's host copy of an adapter: from its header alone, so every rank knows every
    other's.
    """
    saved = dict(adapter.saved_ids)
    elements = ids = 0
    for target in spec.targets:
        if target.name not in adapter.targets:
            continue
        if target.parallel is LoraParallel.NORM:
            elements += target.num_layers * target.in_features
            continue
        a, b = slot_shapes(spec, target, rank, world_size)
        if target.name in saved:
            part = _vocab_part(target, rank, world_size)
            rows = sum(token in part for token in saved[target.name])
            elements, ids = elements + rows * target.hidden_size, ids + rows
        else:
            elements += math.prod(a) + math.prod(b)
        if target.name in adapter.biased and _adds_bias(target, rank):
            elements += math.prod(b[:2])
    return elements * dtype.itemsize + ids * torch.int64.itemsize


def _adds_bias(target: LoraTarget, rank: int) -> bool:
    """A row-parallel output is summed over the ranks: one of them adds the bias."""
    return target.parallel is not LoraParallel.ROW or rank == 0


def _vocab_part(target: LoraTarget, rank: int, world_size: int) -> range:
    """The ids of an embedding or a head that ``rank`` holds."""
    return vocab_part(target.vocab_size, rank, world_size)[1]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _copy_serially(target: torch.Tensor, source: torch.Tensor, scaling: float) -> None:
    """``target = source * scaling``, multiplied in float32 and cast once."""
    for to, part in zip(_serial_parts(target), _serial_parts(source), strict=True):
        to.copy_(part if scaling == 1.0 else part.float() * scaling)


def _refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    # A finite sum has finite terms; the exact count is ten times slower, and for bad tensors only.
    if all(math.isfinite(part.sum(dtype=torch.float32)) for part in _serial_parts(tensor)):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise AdapterError(
            f"{what} holds {bad} values that are not finite (NaN or Inf): its training went wrong, "
            "or the dtype is too narrow for it"
        )


def _any(tensor: torch.Tensor) -> bool:
    return any(bool(part.any()) for part in _serial_parts(tensor))


def _serial_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows in parts that torch works through on the calling thread alone.

    A reader must not take the step thread's cores: larger tensors would wake torch's whole pool of
    threads, and limiting the pool is a setting of the process.
    """
    if tensor.numel() <= _SERIAL_ELEMENTS:
        return [tensor]
    step = max(1, _SERIAL_ELEMENTS // math.prod(tensor.shape[1:]))
    return [tensor[first : first + step] for first in range(0, len(tensor), step)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Zeros on the CPU; unless pinned, as pages the system zeroes when they are first written."""
    if pin or 0 in shape:
        return torch.zeros(shape, dtype=dtype, pin_memory=pin)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
