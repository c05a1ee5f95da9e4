"""The digest of an adapter: one number for its weights and every setting that changes its delta.

Over the unsharded, unscaled tensors in the model's order, so it is the same for any tensor-parallel
size, key prefix and order of tensors in the file. No torch.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from mstar_tp.lora.checkpoint import AdapterModule
from mstar_tp.tensor_file import TensorInfo


class Buffer(Protocol):
    """Bytes as hashlib takes them."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class AdapterDigest:
    """Feed each module once, in the order of ``AdapterFile.modules``."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"mstar_tp adapter 1")

    def add(self, module: AdapterModule, a: Buffer, b: Buffer) -> None:
        """One module's settings and the bytes of its two tensors as the file holds them."""
        head = " ".join(
            f"{part}" for part in (module.name, module.rank, *_kind(module.a), *_kind(module.b))
        )
        self._hash.update(struct.pack("<id", len(head), module.scaling) + head.encode())
        self._hash.update(a)
        self._hash.update(b)

    def hex(self) -> str:
        """The digest so far: 32 hexadecimal digits."""
        return self._hash.hexdigest()[:32]


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    return info.dtype, info.shape
