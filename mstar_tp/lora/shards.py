"""Reading an adapter's tensors and keeping this rank's part of them, laid out like a device slot.

Runs on reader threads, holds no lock. Whole tensors pass through memory of our own one module at a
time; only the shard stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch

from mstar_tp.errors import AdapterError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.checkpoint import AdapterFile, AdapterModule, header_hash, identify
from mstar_tp.lora.digest import AdapterDigest
from mstar_tp.lora.spec import LoraSpec, LoraTarget
from mstar_tp.tensor_file import TensorFile
from mstar_tp.wire.messages import AdapterKey

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
) -> LoadedAdapter:
    """This rank's shard of a checked adapter, in ``dtype``. Blocks on the disk.

    Raises:
        AdapterError: the file has changed since it was checked, holds a number that is not finite
            (as stored or in ``dtype``), or hashes to another digest than ``digest``.
    """
    shard = _Shard(spec, file, rank, world_size, dtype, pin)
    hasher = AdapterDigest()
    with TensorFile(file.weights, error=AdapterError) as tensors:
        if (
            identify(file.weights) != file.identity
            or header_hash(tensors.header) != file.header_hash
        ):
            raise AdapterError(
                f"adapter {key.name!r}: {file.weights} has changed since it was loaded: load it "
                "again under its name"
            )
        for module in file.modules:
            a, b = tensors.read(module.a_key), tensors.read(module.b_key)
            hasher.add(module, _bytes(a), _bytes(b))
            for name, tensor in ((module.a_key, a), (module.b_key, b)):
                _refuse_non_finite(tensor, f"adapter {key.name!r}: {file.weights}: {name}")
            shard.add(module, a, b)
        if identify(file.weights) != file.identity:
            raise AdapterError(
                f"adapter {key.name!r}: {file.weights} was changed while it was read: load it "
                "again under its name once it is whole"
            )
    found = hasher.hex()
    if digest is not None and found != digest:
        raise AdapterError(
            f"adapter {key.name!r}: {file.weights} has digest {found}, but was served with "
            f"{digest}: load it again "
            "under its name"
        )
    return LoadedAdapter(
        key=key,
        digest=found,
        rank=file.rank,
        scaling={module.name: module.scaling for module in file.modules},
        a=shard.a,
        b=shard.b,
    )


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
        self._dtype = dtype
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        wanted = {module.place.target.name: module.place.target for module in file.modules}
        for name, target in wanted.items():
            a, b = slot_shapes(spec, target, rank, world_size)
            self.a[name] = _zeros(a, dtype, pin)
            self.b[name] = _zeros(b, dtype, pin)

    def add(self, module: AdapterModule, a_RI: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Keep this rank's slices of one module's full A and B."""
        target, layer, index = module.place
        columns = target.in_range(self._rank, self._world_size)
        out = target.out_ranges(self._rank, self._world_size)
        rows, first = out[index], sum(len(part) for part in out[:index])
        a_first = index * self._max_rank
        kept_a = self.a[target.name][layer, a_first : a_first + module.rank]
        _copy_serially(kept_a, a_RI[:, columns.start : columns.stop], 1.0)
        kept_b = self.b[target.name][layer, first : first + len(rows), : module.rank]
        _copy_serially(kept_b, b_OR[rows.start : rows.stop], module.scaling)
        _refuse_non_finite(
            kept_b, f"{module.name} lora_B times {module.scaling:g} in {self._dtype}"
        )


def slot_shapes(
    spec: LoraSpec, target: LoraTarget, rank: int, world_size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of one slot's A [layers, slices * max_rank, in] and B [layers, out, max_rank] on one
    rank.
    """
    columns = len(target.in_range(rank, world_size))
    rows = sum(len(part) for part in target.out_ranges(rank, world_size))
    a = (target.num_layers, len(target.out_slices) * spec.max_rank, columns)
    return a, (target.num_layers, rows, spec.max_rank)


def shard_bytes(
    spec: LoraSpec, targets: Collection[str], rank: int, world_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one rank's host copy of an adapter that changes ``targets``: from its header alone,
    so every rank knows every other's.
    """
    sizes = (
        math.prod(shape)
        for target in spec.targets
        if target.name in targets
        for shape in slot_shapes(spec, target, rank, world_size)
    )
    return sum(sizes) * dtype.itemsize


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
        raise AdapterError(f"{what} holds {bad} values that are not finite (NaN or Inf)")


def _serial_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows in parts that torch works through on the calling thread alone.

    A reader must not take the step thread's cores: larger tensors would wake torch's whole pool of
    threads, and limiting the pool is a setting of the process.
    """
    if tensor.numel() <= _SERIAL_ELEMENTS:
        return [tensor]
    step = max(1, _SERIAL_ELEMENTS // tensor.shape[1])
    return [tensor[first : first + step] for first in range(0, len(tensor), step)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Zeros on the CPU; unless pinned, as pages the system zeroes when they are first written."""
    if pin:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
