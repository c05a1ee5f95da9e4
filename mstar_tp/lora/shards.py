"""Reading an adapter's tensors and keeping this rank's part of them, laid out like a device slot.

Runs on reader threads, holds no lock. Whole tensors pass through memory of our own one module at a
time; only the shard stays.
"""

from __future__ import annotations

import torch

from mstar_tp.errors import AdapterError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.checkpoint import AdapterFile, AdapterModule, header_hash, identify
from mstar_tp.lora.digest import AdapterDigest
from mstar_tp.lora.spec import LoraSpec, LoraTarget
from mstar_tp.tensor_file import TensorFile
from mstar_tp.wire.messages import AdapterKey


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
            self.a[name] = torch.zeros(a, dtype=dtype, pin_memory=pin)
            self.b[name] = torch.zeros(b, dtype=dtype, pin_memory=pin)

    def add(self, module: AdapterModule, a_RI: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Keep this rank's slices of one module's full A and B."""
        target, layer, index = module.place
        columns = target.in_range(self._rank, self._world_size)
        out = target.out_ranges(self._rank, self._world_size)
        rows, first = out[index], sum(len(part) for part in out[:index])
        a_first = index * self._max_rank
        self.a[target.name][layer, a_first : a_first + module.rank] = a_RI[
            :, columns.start : columns.stop
        ].to(self._dtype)
        scaled = b_OR[rows.start : rows.stop].float() * module.scaling
        kept = self.b[target.name][layer, first : first + len(rows), : module.rank]
        kept.copy_(scaled)
        _refuse_non_finite(kept, f"{module.name} lora_B times {module.scaling:g} in {self._dtype}")


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


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise AdapterError(f"{what} holds {bad} values that are not finite (NaN or Inf)")
