"""Writing a safetensors file part by part: what is in memory is a part, never the file.

The header stands first and says where every tensor lies, so shapes and dtypes are told at the
start and bytes may come in any order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mstar_tp.tensor_files.header import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8


class TensorEntry(NamedTuple):
    """A tensor to be written: dtype as safetensors spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class TensorWriter:
    """One safetensors file that is being written. Use it as a context: it is on the disk after.

    ``target`` is a path that must not exist, or a descriptor, which is closed. Raises OSError as
    the disk does.
    """

    def __init__(self, target: Path | int, entries: Mapping[str, TensorEntry]) -> None:
        # Wide dtypes first, as the safetensors library writes them: all stay aligned.
        order = sorted(entries, key=lambda name: (-DTYPE_BYTES[entries[name].dtype], name))
        header, at = {"__metadata__": {"format": "pt"}}, 0
        self._starts: dict[str, int] = {}
        for name in order:
            dtype, shape = entries[name]
            end = at + entries[name].num_bytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}  # type: ignore[dict-item]
            self._starts[name], at = at, end
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % _ALIGNMENT)
        self._data = 8 + len(head)
        self._missing, self.size = at, self._data + at
        if isinstance(target, int):
            self._fd = target
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(target, flags, 0o666)
        self._put(memoryview(len(head).to_bytes(8, "little") + head), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert self._missing == 0, f"{self._missing} bytes were never written"
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, name: str, part: torch.Tensor | bytes, first_byte: int = 0) -> None:
        """``part`` of the tensor ``name``, from its byte ``first_byte`` on. Blocks on the disk."""
        data = memoryview(part if isinstance(part, bytes) else _as_bytes(part))
        self._put(data, self._data + self._starts[name] + first_byte)
        self._missing -= len(data)

    def _put(self, view: memoryview, at: int) -> None:
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done


def _as_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's elements as a flat numpy array of bytes."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
