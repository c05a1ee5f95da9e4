"""Reading safetensors files without trusting them and without mapping them.

The header is checked whole against the file's size before any tensor is read, so a truncated,
padded or foreign file is refused by name. Tensor bytes go by positioned reads into memory of our
own: a file that is overwritten later changes nothing that was loaded, one that shrinks is an error
and not a SIGBUS. Nothing here allocates more than the file holds. Importing this module imports no
torch; reading tensors does. A TensorFile may be read by several threads at once.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mstar_tp.common.confined_files import open_file
from mstar_tp.common.errors import CheckpointError, MstarError
from mstar_tp.tensor_files.header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    Header,
    RefusedError,
    TensorInfo,
    parse_header,
)

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_BYTES", "Header", "TensorFile", "TensorInfo", "read_header"]

CHUNK_BYTES = 2 << 20
"""Bytes of staging memory for a read that cannot land straight in its destination."""
_RUN_BYTES = 4096
"""Column runs this long are read one by one, shorter ones by whole rows: a disk reads pages."""


def read_header(path: str | Path, *, error: type[MstarError] = CheckpointError) -> Header:
    """The checked header of a safetensors file. Reads the header's bytes only.

    Raises:
        error: the file is missing, no regular file, an LFS pointer, empty, truncated, longer than
            its header says, or its header is malformed; the message names the file and the tensor.
    """
    with TensorFile(path, error=error) as file:
        return file.header


class TensorFile:
    """An open safetensors file with a checked header. Holds one file descriptor until closed."""

    def __init__(
        self,
        path: str | Path,
        *,
        error: type[MstarError] = CheckpointError,
        max_header_bytes: int = MAX_HEADER_BYTES,
    ) -> None:
        self.path = Path(path)
        self._error = error
        self._fd = -1
        try:
            self._fd = open_file(self.path)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise RefusedError("is not a regular file", "give the file itself")
            self.size = status.st_size
            self.header = parse_header(self._fd, self.size, max_header_bytes)
        except (RefusedError, OSError) as cause:
            self.close()
            raise error(f"{self.path}: {_why(cause)}") from None

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

    def read_bytes(self, name: str, part: range | None = None) -> bytes:
        """The tensor's bytes as the file holds them, or those of ``part``.

        Imports no torch. Blocks on the disk.
        """
        info = self.info(name)
        part = range(info.num_bytes) if part is None else part
        _check_range(part, info.num_bytes)
        data = bytearray(len(part))
        if data:
            self._fill(info.start + part.start, memoryview(data))
        return bytes(data)

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole tensor in the file's dtype, in ``out`` if given.

        ``out`` is contiguous CPU memory of the tensor's shape and dtype. Blocks on the disk.
        """
        info = self.info(name)
        out = self._destination(name, info, info.shape, out)
        assert out.dtype == info.torch_dtype, f"{name}: out is {out.dtype}"
        self._read_into(info.start, out)
        return out

    def read_rows(self, name: str, rows: range, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows ``rows`` (of the first dim, step 1) of a tensor, in ``out`` if given.

        ``out`` is a contiguous CPU tensor of the rows' shape; the bytes land straight in it when
        its dtype is the file's, else they are converted in bounded chunks. Blocks on the disk.
        """
        info = self.info(name)
        out = self._destination(name, info, (len(rows), *info.shape[1:]), out)
        return self._rows(info, rows, out)

    def _rows(self, info: TensorInfo, rows: range, out: torch.Tensor) -> torch.Tensor:
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
        """Columns ``columns`` (step 1) of a tensor of two dims, in ``out`` if given.

        Staging memory is bounded whatever the tensor's size. Long runs are read alone, so a rank
        reads its own bytes only. Blocks on the disk.
        """
        info = self.info(name)
        assert len(info.shape) == 2, f"{name} has shape {info.shape}, wanted two dims"
        out = self._destination(name, info, (info.shape[0], len(columns)), out)
        return self._columns(info, columns, out)

    def read_matrix(
        self, name: str, index: int, rows: range, columns: range, out: torch.Tensor
    ) -> torch.Tensor:
        """A part of matrix ``index`` of a tensor of three dims, in ``out``.

        It is ``rows`` of the matrix or ``columns`` of it; the other is whole. As ``read_rows`` and
        ``read_columns``.
        """
        info = self.info(name)
        assert len(info.shape) == 3, f"{name} has shape {info.shape}, wanted three dims"
        out = self._destination(name, info, (len(rows), len(columns)), out)
        _check_range(range(index, index + 1), info.shape[0])
        num_bytes = _row_bytes(info)
        matrix = TensorInfo(
            dtype=info.dtype,
            shape=info.shape[1:],
            start=info.start + index * num_bytes,
            num_bytes=num_bytes,
        )
        if len(columns) == matrix.shape[1]:
            return self._rows(matrix, rows, out)
        assert len(rows) == matrix.shape[0], "either all rows or all columns"
        return self._columns(matrix, columns, out)

    def _columns(self, info: TensorInfo, columns: range, out: torch.Tensor) -> torch.Tensor:
        _check_range(columns, info.shape[1])
        item = DTYPE_BYTES[info.dtype]
        if len(columns) == info.shape[1]:
            return self._rows(info, range(info.shape[0]), out)
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
                    "it was opened: something shrank it while it was read"
                )
            done += got


def _why(cause: RefusedError | OSError) -> str:
    if isinstance(cause, RefusedError):
        return str(cause)
    # What opening a socket comes to.
    return (
        "is not a regular file"
        if cause.errno == errno.ENXIO
        else f"cannot be read: {cause.strerror}"
    )


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
