"""Reading safetensors files without trusting them and without mapping them.

The header is checked whole against the file's size before any tensor is read, so a truncated,
padded or foreign file is refused by name. Tensor bytes go by positioned reads into memory of our
own: a file that is overwritten later changes nothing that was loaded, one that shrinks is an error
and not a SIGBUS. Nothing here allocates more than the file holds. Importing this module imports no
torch; reading tensors does. A TensorFile may be read by several threads at once.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mstar_tp.errors import CheckpointError, MstarError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 16
CHUNK_BYTES = 2 << 20
"""Bytes of staging memory for a read that cannot land straight in its destination."""
_RUN_BYTES = 4096
"""Column runs at least this long are read one by one; shorter ones by whole rows (a disk reads
pages anyhow).
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor's entry: dtype as safetensors spells it, shape, and where its bytes stand in the
    file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, _TORCH_DTYPES[self.dtype])
        assert isinstance(dtype, torch.dtype)
        return dtype


class Header(dict[str, TensorInfo]):
    """Tensor name -> TensorInfo in file order, with the file's free-text ``metadata``."""

    def __init__(self, entries: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
        super().__init__(entries)
        self.metadata = metadata


class _RefusedError(Exception):
    """What is wrong with a header; the caller adds the file's name and its own error type."""


def read_header(path: str | Path, *, error: type[MstarError] = CheckpointError) -> Header:
    """The checked header of a safetensors file. Reads the header's bytes only.

    Raises:
        error: the file is missing, no regular file, an LFS pointer, empty, truncated, longer than
            its header says, or its header is malformed; the message names the file and the tensor.
    """
    with TensorFile(path, error=error) as file:
        return file.header


class TensorFile:
    """An open safetensors file whose header has been checked. Holds one file descriptor until
    closed.
    """

    def __init__(self, path: str | Path, *, error: type[MstarError] = CheckpointError) -> None:
        self.path = Path(path)
        self._error = error
        self._fd = -1
        try:
            # A FIFO or device would block in open(); only a regular file gets that far.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise _RefusedError("is not a regular file")
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
            self.header = _parse(self._fd, self.size)
        except (_RefusedError, OSError) as cause:
            self.close()
            text = cause.strerror if isinstance(cause, OSError) else str(cause)
            raise error(f"{self.path}: {text}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; reads afterwards are an error. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def info(self, name: str) -> TensorInfo:
        """The header's entry of ``name``.

        Raises:
            MstarError: of the type given at construction, when the file has no such tensor.
        """
        if name not in self.header:
            raise self._error(f"{self.path}: holds no tensor {name!r}")
        return self.header[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in the file's dtype, on the CPU, in memory of its own. Blocks on the
        disk.
        """
        import torch

        info = self.info(name)
        out = torch.empty(info.shape, dtype=info.torch_dtype)
        self._read_into(info.start, out)
        return out

    def read_rows(self, name: str, rows: range, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows ``rows`` (of the first dim, step 1) of a tensor of one or more dims, in ``out`` if
        given.

        ``out`` is a contiguous CPU tensor of the rows' shape; the bytes land straight in it when
        its dtype is the file's, else they are converted in bounded chunks. Blocks on the disk.
        """
        info = self.info(name)
        out = self._destination(name, info, (len(rows), *info.shape[1:]), out)
        _check_range(rows, info.shape[0])
        row_bytes = _row_bytes(info)
        if out.dtype == info.torch_dtype:
            self._read_into(info.start + rows.start * row_bytes, out)
            return out
        for chunk in _chunks(rows, row_bytes):
            staged = self._stage(info, chunk)
            out[chunk.start - rows.start : chunk.stop - rows.start].copy_(staged)
        return out

    def read_columns(
        self, name: str, columns: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Columns ``columns`` (of the last dim, step 1) of a tensor of two dims, in ``out`` if
        given.

        Staging memory is bounded whatever the tensor's size. Long runs are read alone, so a rank
        reads its own bytes only. Blocks on the disk.
        """
        info = self.info(name)
        assert len(info.shape) == 2, f"{name} has shape {info.shape}, wanted two dims"
        out = self._destination(name, info, (info.shape[0], len(columns)), out)
        _check_range(columns, info.shape[1])
        item = DTYPE_BYTES[info.dtype]
        if len(columns) == info.shape[1]:
            return self.read_rows(name, range(info.shape[0]), out)
        if len(columns) * item < _RUN_BYTES:
            for chunk in _chunks(range(info.shape[0]), _row_bytes(info)):
                staged = self._stage(info, chunk)
                out[chunk.start : chunk.stop].copy_(staged[:, columns.start : columns.stop])
            return out
        self._read_runs(info, columns, out)
        return out

    def _read_runs(self, info: TensorInfo, columns: range, out: torch.Tensor) -> None:
        import torch

        same = out.dtype == info.torch_dtype
        row_bytes, first = _row_bytes(info), info.start + columns.start * DTYPE_BYTES[info.dtype]
        for chunk in _chunks(range(info.shape[0]), len(columns) * DTYPE_BYTES[info.dtype]):
            target = out[chunk.start : chunk.stop]
            staged = target if same else torch.empty(target.shape, dtype=info.torch_dtype)
            for row, run in zip(chunk, _as_bytes(staged).reshape(len(chunk), -1), strict=True):
                self._fill(first + row * row_bytes, memoryview(run))
            if not same:
                target.copy_(staged)

    def _destination(
        self, name: str, info: TensorInfo, shape: tuple[int, ...], out: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        if out is None:
            return torch.empty(shape, dtype=info.torch_dtype)
        assert tuple(out.shape) == shape, f"{name}: out is {tuple(out.shape)}, wanted {shape}"
        assert out.is_contiguous() and out.device.type == "cpu", f"{name}: out must be plain memory"
        return out

    def _stage(self, info: TensorInfo, rows: range) -> torch.Tensor:
        import torch

        staged = torch.empty((len(rows), *info.shape[1:]), dtype=info.torch_dtype)
        self._read_into(info.start + rows.start * _row_bytes(info), staged)
        return staged

    def _read_into(self, offset: int, out: torch.Tensor) -> None:
        if out.numel():
            self._fill(offset, memoryview(_as_bytes(out)))

    def _fill(self, offset: int, view: memoryview) -> None:
        assert self._fd >= 0, f"{self.path} is closed"
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as cause:
                raise self._error(
                    f"{self.path}: reading at byte {offset + done} failed: {cause.strerror}"
                ) from None
            if got == 0:
                raise self._error(
                    f"{self.path}: ends at byte {offset + done}, but held {self.size} bytes when "
                    "it was "
                    f"opened: something shrank it while it was read"
                )
            done += got


def _as_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a flat numpy array of bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def _row_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape[1:]) * DTYPE_BYTES[info.dtype]


def _chunks(rows: range, row_bytes: int) -> list[range]:
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def _check_range(part: range, size: int) -> None:
    assert part.step == 1 and 0 <= part.start <= part.stop <= size, f"{part} is not within {size}"


def _parse(fd: int, size: int) -> Header:
    if size == 0:
        raise _RefusedError("is empty")
    head = os.pread(fd, 64, 0)
    if head.startswith(b"version https://git-lfs"):
        raise _RefusedError(
            "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
        )
    if head.startswith(
        (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")
    ) and size < int.from_bytes(head[:8], "little"):
        raise _RefusedError("is a pickle, which can run code: convert it to safetensors")
    if size < 8:
        raise _RefusedError(f"is {size} bytes, too short for a safetensors header: it is truncated")
    length = int.from_bytes(head[:8], "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise _RefusedError(
            f"says its header is {length} bytes, but the file is {size} bytes (and a header at "
            "most "
            f"{MAX_HEADER_BYTES}): it is truncated or no safetensors file"
        )
    raw = os.pread(fd, length, 8)
    if len(raw) != length:
        raise _RefusedError(f"ends inside its header of {length} bytes: it is truncated")
    return _entries(raw, data_start=8 + length, data_bytes=size - 8 - length)


def _entries(raw: bytes, *, data_start: int, data_bytes: int) -> Header:
    try:
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as cause:
        raise _RefusedError(f"has a header that is not JSON: {cause}") from None
    if not raw.startswith(b"{") or not isinstance(tree, dict):
        raise _RefusedError("has a header that is not a JSON object")
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _RefusedError("has a __metadata__ that is not a mapping of strings")
    entries = {name: _entry(name, entry, data_start) for name, entry in tree.items()}
    _check_cover(entries, data_start, data_bytes)
    return Header(entries, metadata)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RefusedError(f"names {name!r} twice in its header")
            seen.add(name)
    return tree


def _entry(name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _RefusedError(f"tensor {name!r}: its entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _RefusedError(f"tensor {name!r}: dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise _RefusedError(f"tensor {name!r}: shape {shape!r} is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _RefusedError(f"tensor {name!r}: data_offsets {offsets!r} are not a start and an end")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise _RefusedError(
            f"tensor {name!r}: {dtype} of shape {shape} is {num_bytes} bytes, but its data_offsets "
            "span "
            f"{offsets[1] - offsets[0]}"
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
            raise _RefusedError(
                f"tensor {name!r}: starts at byte {info.start}, {kind} after {last!r}"
            )
        end, last = info.start + info.num_bytes, name
    size = data_start + data_bytes
    if end > size:
        raise _RefusedError(
            f"tensor {last!r}: ends at byte {end}, but the file is {size} bytes: it is truncated"
        )
    if end < size:
        raise _RefusedError(f"holds {size - end} bytes after its last tensor: it is damaged")
