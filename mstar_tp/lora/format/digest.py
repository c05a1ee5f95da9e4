"""The digest of an adapter: one number for its weights and every setting that changes its delta.

Over the unsharded, unscaled tensors in the model's order, so it is the same for any tensor-parallel
size, key spelling, order of tensors and split into files. No torch.
"""

from __future__ import annotations

import struct
from typing import Protocol

from blake3 import blake3

from mstar_tp.lora.format.adapter_files import StoredTensor
from mstar_tp.lora.format.parts import AdapterModule, SavedNorm, SavedRows


class Buffer(Protocol):
    """Bytes as a hash takes them."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class AdapterDigest:
    """Feed each module, each set of saved rows and each norm once, in ``AdapterFile``'s order."""

    def __init__(self) -> None:
        self._hash = blake3(b"mstar_tp adapter 2")

    def add(self, module: AdapterModule, a: Buffer, b: Buffer, bias: Buffer | None) -> None:
        """One module's settings and the bytes of its tensors as the file holds them."""
        stored = [module.a, module.b, *([] if module.bias is None else [module.bias])]
        kind = "swapped" if module.swapped else "pair"
        self._head(module.scaling, kind, module.name, module.lora_rank, *map(_kind, stored))
        for buffer in (a, b, bias):
            if buffer is not None:
                self._hash.update(buffer)

    def add_rows(self, saved: SavedRows, rows: Buffer) -> None:
        """Add the ids of a weight's replaced rows, and the bytes of the rows that replace them."""
        self._head(0.0, "rows", saved.name, _kind(saved.tensor), len(saved.ids))
        self._hash.update(struct.pack(f"<{len(saved.ids)}q", *saved.ids))
        self._hash.update(rows)

    def add_norm(self, saved: SavedNorm, weight: Buffer) -> None:
        """A norm's weight that is replaced."""
        self._head(0.0, "norm", saved.name, _kind(saved.tensor))
        self._hash.update(weight)

    def hex(self) -> str:
        """The digest so far: 32 hexadecimal digits."""
        return self._hash.hexdigest(length=16)

    def _head(self, number: float, *fields: object) -> None:
        text = " ".join(str(field) for field in fields).encode()
        self._hash.update(struct.pack("<id", len(text), number) + text)


def _kind(tensor: StoredTensor) -> str:
    return f"{tensor.info.dtype} {tensor.info.shape}"
