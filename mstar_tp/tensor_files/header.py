"""The header of a safetensors file, checked whole against the file's size. Imports no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mstar_tp.common.strict_json import JsonError, parse_json
from mstar_tp.common.strict_json import show as _show

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 16
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64",
}  # fmt: skip


def torch_dtype(code: str) -> torch.dtype:
    """torch's dtype for one of ``DTYPE_BYTES``."""
    import torch

    dtype = getattr(torch, _TORCH_DTYPES[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor's entry: dtype as safetensors spells it, shape, and where its bytes stand."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)


class Header(dict[str, TensorInfo]):
    """Tensor name -> TensorInfo in file order, with the file's free-text ``metadata``."""

    def __init__(self, entries: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
        super().__init__(entries)
        self.metadata = metadata


class RefusedError(Exception):
    """A header's fault and its remedy; the caller adds the file's name and its own error type."""

    def __init__(self, what: str, remedy: str = "copy or save the file again") -> None:
        super().__init__(f"{what}: {remedy}")


def parse_header(fd: int, size: int, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read and check the header of the open file ``fd`` of ``size`` bytes.

    The header may have at most ``max_bytes``.

    Raises:
        RefusedError: what is wrong with it, without the file's name.
    """
    if size == 0:
        raise RefusedError("is empty")
    head = os.pread(fd, 64, 0)
    if head.startswith(b"version https://git-lfs"):
        raise RefusedError(
            "is a Git LFS pointer, not the file itself", "run `git lfs pull` in its folder"
        )
    if head.startswith(
        (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")
    ) and size < int.from_bytes(head[:8], "little"):
        raise RefusedError("is a pickle, which can run code", "convert it to safetensors")
    if size < 8:
        raise RefusedError(f"is {size} bytes, too short for a safetensors header: it is truncated")
    length = int.from_bytes(head[:8], "little")
    if length > min(size - 8, max_bytes):
        raise RefusedError(
            f"says its header is {length} bytes, but the file is {size} (and a header at most "
            f"{max_bytes}): it is truncated or no safetensors file"
        )
    raw = os.pread(fd, length, 8)
    if len(raw) != length:
        raise RefusedError(f"ends inside its header of {length} bytes: it is truncated")
    return _entries(raw, data_start=8 + length, data_bytes=size - 8 - length)


def _entries(raw: bytes, *, data_start: int, data_bytes: int) -> Header:
    try:
        tree = parse_json(raw)
    except JsonError as cause:
        raise RefusedError(f"has a header that {cause}") from None
    if not raw.startswith(b"{") or not isinstance(tree, dict):
        raise RefusedError("has a header that is not a JSON object")
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RefusedError("has a __metadata__ that is not a mapping of strings")
    entries = {name: _entry(name, entry, data_start) for name, entry in tree.items()}
    _check_cover(entries, data_start, data_bytes)
    return Header(entries, metadata)


def _entry(name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise RefusedError(f"tensor {_show(name)}: its entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise RefusedError(
            f"tensor {_show(name)}: dtype {_show(dtype)} is none of {', '.join(DTYPE_BYTES)}"
        )
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise RefusedError(f"tensor {_show(name)}: shape {_show(shape)} is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise RefusedError(
            f"tensor {_show(name)}: data_offsets {_show(offsets)} are not a start and an end"
        )
    if math.prod(size for size in shape if size) >= 1 << 60:
        raise RefusedError(f"tensor {_show(name)}: shape {_show(shape)} is larger than any memory")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise RefusedError(
            f"tensor {_show(name)}: {dtype} of shape {_show(shape)} is {num_bytes} bytes, but its "
            f"data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorInfo(
        dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], num_bytes=num_bytes
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_cover(entries: dict[str, TensorInfo], data_start: int, data_bytes: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    end, last = data_start, "the header"
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for name, info in ordered:
        if info.start != end:
            kind = "overlap" if info.start < end else "a gap"
            raise RefusedError(
                f"tensor {_show(name)}: starts at byte {info.start}, {kind} after {_show(last)}"
            )
        end, last = info.start + info.num_bytes, name
    size = data_start + data_bytes
    if end > size:
        raise RefusedError(
            f"tensor {_show(last)}: ends at byte {end}, but the file at {size}: it is truncated"
        )
    if end < size:
        raise RefusedError(f"holds {size - end} bytes after its last tensor: it is damaged")
