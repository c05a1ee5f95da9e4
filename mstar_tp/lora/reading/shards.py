"""Reading an adapter's tensors and keeping this rank's part of them, laid out like a device slot.

Runs on reader threads, holds no lock. Whole tensors pass through memory of our own one module at a
time; only the shard stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.distributed.shard import vocab_part
from mstar_tp.lora.format.adapter_files import StoredTensor, identify, open_file, take_part
from mstar_tp.lora.format.checkpoint import (
    AdapterFile,
    AdapterModule,
    SavedNorm,
    SavedRows,
    readable,
)
from mstar_tp.lora.format.digest import AdapterDigest
from mstar_tp.lora.reading.base_weights import BaseWeights, check_copy
from mstar_tp.lora.reading.host_memory import zeros
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter, ReplacedNorms, ReplacedRows
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.tensor_files.reader import TensorFile
from mstar_tp.wire.values import AdapterKey

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
    page_locked: bool,
    digest: str | None = None,
    base: BaseWeights | None = None,
    rest: Callable[[], None] = lambda: None,
) -> LoadedAdapter:
    """This rank's shard of a checked adapter, in ``dtype``. Blocks on the disk.

    ``base`` answers what the base model's weights are, for a file that holds copies of them.
    ``rest`` is called after every bit of work: it may sleep, so that others get the core.

    Raises:
        AdapterError: a file has changed since it was checked, holds a number that is not finite (as
            stored or in ``dtype``) or another base weight than the model's, or the weights hash to
            another digest than ``digest``.
    """
    shard = _Shard(spec, file, rank, world_size, dtype, page_locked)
    hasher = AdapterDigest()
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open_file(part)) for part in file.files]
            _read_parts(file, _Reader(files), shard, hasher, rest)
            for copy in file.copies:
                check_copy(copy, files[copy.tensor.file], base, rank, world_size)
            _check_unchanged(file)
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
        lora_rank=file.lora_rank,
        scaling={module.name: module.scaling for module in file.modules},
        a=shard.a,
        b=shard.b,
        bias=shard.bias,
        rows=shard.rows,
        norms=shard.norms,
    )


def _read_parts(
    file: AdapterFile,
    reader: _Reader,
    shard: _Shard,
    hasher: AdapterDigest,
    rest: Callable[[], None],
) -> None:
    """Hash every tensor of the adapter whole, in the model's order, and keep the rank's part."""
    for module in file.modules:
        a, b = reader.read(module.a, 0), reader.read(module.b, 1)
        bias = None if module.bias is None else reader.read(module.bias, 2)
        parts = None if bias is None else _bytes(bias.data)
        hasher.add(module, _bytes(a.data), _bytes(b.data), parts)
        shard.add(module, a, b, bias)
        rest()
    for saved in file.rows:
        rows = reader.read(saved.tensor)
        hasher.add_rows(saved, _bytes(rows.data))
        shard.replace(saved, rows)
    for norm in file.norms:
        weight = reader.read(norm.tensor)
        hasher.add_norm(norm, _bytes(weight.data))
        shard.replace_norm(norm, weight)


def _check_unchanged(file: AdapterFile) -> None:
    for part in file.files:
        if identify(part.path) != part.identity:
            raise AdapterError(
                f"{part.path} was changed while it was read: load it again under its name once "
                "it is whole"
            )


class _Reader:
    """Reads whole tensors of an adapter's open files, checked, into memory that is used again.

    Pages that the system must clear first cost more than reading them.
    """

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = files
        self._memory: list[torch.Tensor] = []
        self._held: dict[int, tuple[tuple[int, str], _Whole]] = {}
        """Place -> (file, key) of the tensor in its memory, and that: every expert of a stack has
        a part of one."""

    def read(self, stored: StoredTensor, place: int = 0) -> _Whole:
        """The tensor, or its part of one, as a matrix if it has two dims or more.

        It is gone once another is read to its ``place``.
        """
        wanted = stored.file, stored.key
        held = self._held.get(place)
        if held is None or held[0] != wanted:
            held = self._held[place] = wanted, self._read(stored, place)
        whole = held[1]
        if stored.part is None:
            return whole
        return whole._replace(data=take_part(whole.data, stored.part))

    def _read(self, stored: StoredTensor, place: int) -> _Whole:
        file = self._files[stored.file]
        info = file.info(stored.key)
        memory = self._of(place, info.num_bytes)[: info.num_bytes]
        tensor = file.read(stored.key, memory.view(info.torch_dtype).view(info.shape))
        matrix = tensor if tensor.dim() < 2 else tensor.flatten(1)
        what = f"{file.path}: {stored.key}"
        return _Whole(matrix, _largest(matrix, what), what)

    def _of(self, place: int, num_bytes: int) -> torch.Tensor:
        while len(self._memory) <= place:
            self._memory.append(zeros((0,), torch.uint8))
        if self._memory[place].numel() < num_bytes:
            self._memory[place] = zeros((num_bytes,), torch.uint8)
        return self._memory[place]


class _Whole(NamedTuple):
    """A tensor of the file, ``largest`` of its magnitudes, and its name for messages."""

    data: torch.Tensor
    largest: float
    what: str


class _Shard:
    """The CPU copy under construction."""

    def __init__(
        self,
        spec: LoraSpec,
        file: AdapterFile,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        page_locked: bool,
    ) -> None:
        self._max_rank = spec.max_rank
        self._rank, self._world_size = rank, world_size
        self._dtype, self._page_locked = dtype, page_locked
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.bias: dict[str, torch.Tensor] = {}
        self.rows: dict[str, ReplacedRows] = {}
        self.norms: dict[str, ReplacedNorms] = {}
        self.has_effect = False
        wanted = {module.place.target.name: module.place.target for module in file.modules}
        for name, target in wanted.items():
            a, b = slot_shapes(spec, target, rank, world_size)
            # One piece of memory, so that one transfer moves both to a device.
            both = zeros((math.prod(a) + math.prod(b),), dtype, page_locked)
            self.a[name] = both[: math.prod(a)].view(a)
            self.b[name] = both[math.prod(a) :].view(b)
        for module in file.modules:
            target = module.place.target
            if module.bias is not None and _adds_bias(target, self._rank):
                self.bias.setdefault(
                    target.name, zeros(self.b[target.name].shape[:2], dtype, page_locked)
                )

    def add(self, module: AdapterModule, a: _Whole, b: _Whole, bias: _Whole | None) -> None:
        """Keep this rank's slices of one module's full factors."""
        a_RI, b_OR = a.data, b.data
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
                self._keep(kept_a[: len(columns), : module.lora_rank], part_RI.t(), a)
            else:
                a_first = index * self._max_rank
                self._keep(kept_a[a_first : a_first + module.lora_rank], part_RI, a)
            here = slice(start + rows.start, start + rows.stop)
            kept_b = self.b[target.name][layer, first : first + len(rows), : module.lora_rank]
            self._keep(kept_b, b_OR[here], b, module.scaling)
            if bias is not None and _adds_bias(target, self._rank):
                kept_bias = self.bias[target.name][layer, first : first + len(rows)]
                self._keep(kept_bias, bias.data[here], bias, module.scaling)
            start += target.out_slices[index].out_features
        acts = (a.largest and b.largest) or (bias is not None and bias.largest)
        self.has_effect = self.has_effect or bool(module.scaling and acts)

    def replace(self, saved: SavedRows, rows: _Whole) -> None:
        """Keep the rows that fall into this rank's part of the vocabulary."""
        self.has_effect = True
        target = saved.target
        part = _vocab_part(target, self._rank, self._world_size)
        mine = sorted((token, at) for at, token in enumerate(saved.ids) if token in part)
        weight = zeros((len(mine), rows.data.shape[1]), self._dtype, self._page_locked)
        for to, (_, at) in zip(weight, mine, strict=True):
            to.copy_(rows.data[at])
        self._check_range(weight, rows)
        ids = zeros((len(mine),), torch.int64, self._page_locked)
        ids.copy_(torch.tensor([token - part.start for token, _ in mine], dtype=torch.int64))
        self.rows[target.name] = ReplacedRows(ids, weight)

    def replace_norm(self, saved: SavedNorm, weight: _Whole) -> None:
        """Keep a norm's weight, whole on every rank."""
        self.has_effect = True
        target = saved.target
        if target.name not in self.norms:
            shape = (target.num_layers, target.in_features)
            self.norms[target.name] = ReplacedNorms(
                (), zeros(shape, self._dtype, self._page_locked)
            )
        layers, kept = self.norms[target.name]
        self._keep(kept[saved.layer], weight.data, weight)
        self.norms[target.name] = ReplacedNorms((*layers, saved.layer), kept)

    def _keep(
        self, kept: torch.Tensor, source: torch.Tensor, whole: _Whole, scaling: float = 1.0
    ) -> None:
        """Store ``source * scaling`` in ``kept``, multiplied in float32 and cast once.

        ``source`` is a part of ``whole``.
        """
        for to, part in zip(_serial_parts(kept), _serial_parts(source), strict=True):
            if scaling == 1.0:
                to.copy_(part)
            elif to.dtype == part.dtype:
                # torch multiplies narrow floats in float32, and rounds once.
                torch.mul(part, scaling, out=to)
            else:
                to.copy_(part.float() * scaling)
        self._check_range(kept, whole, scaling)

    def _check_range(self, kept: torch.Tensor, whole: _Whole, scaling: float = 1.0) -> None:
        """Refuse values that were finite as stored but are not in the slots' dtype."""
        if whole.largest * abs(scaling) > torch.finfo(self._dtype).max:
            times = "" if scaling == 1.0 else f" times {scaling:g}"
            _largest(kept, f"{whole.what}{times} in {self._dtype}")


def slot_shapes(
    spec: LoraSpec, target: LoraTarget, rank: int, world_size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of a slot's A [layers, slices * max_rank, in] and B [layers, out, max_rank].

    An embedding's A is [1, ids, max_rank]. Vocabularies count padded.
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
    """The facts that a copy's size follows from: an AdapterFile, or what is kept of one."""

    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def biased(self) -> tuple[str, ...]: ...
    @property
    def saved_ids(self) -> tuple[tuple[str, Sequence[int]], ...]: ...


def shard_bytes(
    spec: LoraSpec, adapter: Footprint, rank: int, world_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one rank's CPU copy of an adapter.

    They follow from its header alone, so every rank knows every other's.
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


def _largest(tensor: torch.Tensor, what: str) -> float:
    """The largest magnitude in ``tensor``.

    Raises:
        AdapterError: a value is not finite; how many are.
    """
    largest = 0.0
    for part in _serial_parts(tensor):
        if part.numel():
            low, high = torch.aminmax(part)  # both NaN where there is one
            largest = max(abs(low.item()), abs(high.item()), largest)
            if not math.isfinite(largest):
                bad = int((~torch.isfinite(tensor)).sum())
                raise AdapterError(
                    f"{what} holds {bad} values that are not finite (NaN or Inf): its training "
                    "went wrong, or the dtype is too narrow for it"
                )
    return largest


def _serial_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows in parts that torch works through on the calling thread alone.

    A reader must not take the step thread's cores: larger tensors would wake torch's whole pool of
    threads, and limiting the pool is a setting of the process.
    """
    if tensor.numel() <= _SERIAL_ELEMENTS:
        return [tensor]
    step = max(1, _SERIAL_ELEMENTS // math.prod(tensor.shape[1:]))
    return [tensor[first : first + step] for first in range(0, len(tensor), step)]
