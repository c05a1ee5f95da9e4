"""Promise: a safetensors file is read exactly, in part or whole, and a damaged one is refused by
name.

What the reader returns is compared with what the safetensors package wrote; damage is every kind we
could think of, and random bytes besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from mstar_tp.common.errors import AdapterError, CheckpointError
from mstar_tp.tensor_files.reader import TensorFile, read_header

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_read_whole_are_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(5, 7).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.zeros((0, 3), dtype=dtype),
        "deep": torch.randn(2, 3, 4).to(dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert set(file.header) == set(tensors)
        assert file.header.metadata == {"format": "pt"}
        for name, tensor in tensors.items():
            got = file.read(name)
            assert got.dtype == dtype and torch.equal(got, tensor)


@pytest.mark.parametrize("shape", [(6, 5), (3, 3000), (700, 1300)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_rows_and_columns_are_the_slices_of_the_whole(
    tmp_path: Path,
    shape: tuple[int, int],
    out_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mstar_tp.tensor_files.reader.CHUNK_BYTES", 20_000)
    whole = torch.randn(shape)
    save_file({"pad": torch.ones(3), "w": whole}, tmp_path / "x.safetensors")
    rows, columns = range(1, shape[0] - 1), range(2, shape[1] // 2 + 1)
    with TensorFile(tmp_path / "x.safetensors") as file:

        def out(*size: int) -> torch.Tensor | None:
            return None if out_dtype is None else torch.empty(size, dtype=out_dtype)

        got_rows = file.read_rows("w", rows, out(len(rows), shape[1]))
        got_columns = file.read_columns("w", columns, out(shape[0], len(columns)))
        all_columns = file.read_columns("w", range(shape[1]), out(*shape))
    wanted = whole.to(out_dtype or torch.float32)
    assert torch.equal(got_rows, wanted[rows.start : rows.stop])
    assert torch.equal(got_columns, wanted[:, columns.start : columns.stop])
    assert torch.equal(all_columns, wanted)


def test_what_was_read_stays_when_the_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(64, 64)}, path)
    with TensorFile(path) as file:
        got = file.read("w")
        with path.open("r+b") as raw:
            raw.truncate(200)
        assert torch.equal(got, torch.ones(64, 64))
        with pytest.raises(CheckpointError, match="something shrank it"):
            file.read("w")


GOOD = {"w": entry([2], 0, 8)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"abc", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + b"\0" * 4, "pickle"),
        ((10**9).to_bytes(8, "little") + b"{}", "header is 1000000000 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "truncated or no safetensors"),
        ((3).to_bytes(8, "little") + b"{{{", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "not JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as error:
        read_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (GOOD, b"\0" * 7, "but the file at .* it is truncated"),
        (GOOD, b"\0" * 9, "holds 1 bytes after its last tensor"),
        ({"w": entry([2], 1, 9)}, b"\0" * 9, "a gap"),
        ({"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, b"\0" * 12, "overlap"),
        ({"w": entry([3], 0, 8)}, b"\0" * 8, "is 12 bytes, but its data_offsets span 8"),
        ({"w": entry([2], 0, 8, "F33")}, b"\0" * 8, "dtype 'F33'"),
        ({"w": entry([-2], 0, 8)}, b"\0" * 8, "not a list of sizes"),
        ({"w": entry([1] * 20, 0, 4)}, b"\0" * 4, "not a list of sizes"),
        ({"w": entry([2**29, 2**29], 0, 8)}, b"\0" * 8, "but its data_offsets span 8"),
        ({"w": entry([0, 2**62, 2**62], 0, 0)}, b"", "larger than any memory"),
        ({"w": entry([2], 8, 0)}, b"\0" * 8, "not a start and an end"),
        ({"w": {"dtype": "F32"}}, b"", "not dtype, shape and data_offsets"),
        ({"w": 3}, b"", "not dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}, **GOOD}, b"\0" * 8, "__metadata__"),
        (b'{"w": 1, "w": 2}', b"", "names 'w' twice"),
        (b'{"w":' + b"[" * 100_000, b"", "not JSON"),
        (b'{"w":' + b"9" * 10_000 + b"}", b"", "not JSON"),
    ],
)
def test_a_malformed_header_is_refused_with_the_tensor_at_fault(
    tmp_path: Path, header: object, data: bytes, said: str
) -> None:
    path = write(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(CheckpointError, match=said):
        read_header(path)


def test_a_message_about_a_hostile_header_stays_short(tmp_path: Path) -> None:
    for header in ({"w" * 100_000: 3}, {"w": {**entry([2], 0, 8), "shape": [-1] * 100_000}}):
        with pytest.raises(CheckpointError) as error:
            read_header(write(tmp_path / "x.safetensors", header))
        assert len(str(error.value)) < 1000


def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_header(path)


def test_the_caller_chooses_the_error_type(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(2)}, path)
    with TensorFile(path, error=AdapterError) as file, pytest.raises(AdapterError, match="'v'"):
        file.read("v")
    path.write_bytes(b"")
    with pytest.raises(AdapterError):
        TensorFile(path, error=AdapterError)


def test_importing_the_reader_and_reading_a_header_imports_no_torch(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from mstar_tp.tensor_files.reader import read_header; "
        "read_header(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    path = str(tmp_path / "x.safetensors")
    subprocess.run([sys.executable, "-c", code, path], check=True)


SAMPLE = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float16)})


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_bytes_give_a_clear_error_or_a_consistent_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["set", "insert", "delete", "cut"])):
            case "set":
                raw[where : where + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                raw[where:where] = data.draw(st.binary(min_size=1, max_size=8))
            case "delete":
                del raw[where : where + data.draw(st.integers(1, 8))]
            case "cut":
                del raw[where:]
    path = tmp_path_factory.mktemp("mutated") / "x.safetensors"
    path.write_bytes(raw)
    try:
        with TensorFile(path) as file:
            total = sum(info.num_bytes for info in file.header.values())
            assert total + 8 + int.from_bytes(raw[:8], "little") == len(raw)
            for name, info in file.header.items():
                got = file.read(name)
                assert got.shape == info.shape and got.nbytes == info.num_bytes
    except CheckpointError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
