"""Pins why files are read and written by code of ours: each test shows what the library does.

A test that fails here after an upgrade of safetensors says that a reason is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from safetensors.torch import load_file, save_file

from mstar_tp.common.errors import CheckpointError
from mstar_tp.tensor_files.reader import TensorFile, read_header
from mstar_tp.tensor_files.writer import TensorEntry, TensorWriter

ROWS, WIDTH = 4096, 1024

SHRUNK = """
import os, sys, torch
path = sys.argv[1]
if sys.argv[2] == "library":
    from safetensors import safe_open
    file = safe_open(path, "pt")
    read = lambda: file.get_tensor("w").sum()
else:
    from mstar_tp.common.errors import CheckpointError
    from mstar_tp.tensor_files.reader import TensorFile
    file = TensorFile(path)
    read = lambda: file.read("w").sum()
os.truncate(path, 4096)
try:
    read()
except Exception as error:
    print(type(error).__name__)
"""

MAPPED = """
import sys
path = sys.argv[1]
if sys.argv[2] == "library":
    from safetensors import safe_open
    part = safe_open(path, "pt").get_slice("w")[8:16]
else:
    from mstar_tp.tensor_files.reader import TensorFile
    part = TensorFile(path).read_rows("w", range(8, 16))
print(path in open("/proc/self/maps").read(), float(part.sum()))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(ROWS, WIDTH)}, path)
    return path


def run(code: str, path: Path, reader: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(path), reader]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_that_shrinks_kills_who_maps_it_and_is_an_error_to_who_reads_it(file: Path) -> None:
    ours = run(SHRUNK, file, "ours")
    assert (ours.returncode, ours.stdout) == (0, "CheckpointError\n"), ours.stderr
    save_file({"w": torch.ones(ROWS, WIDTH)}, file)
    assert run(SHRUNK, file, "library").returncode == -signal.SIGBUS


def test_the_library_reads_slices_through_a_mapping_of_the_file(file: Path) -> None:
    total = float(8 * WIDTH)
    assert run(MAPPED, file, "ours").stdout == f"False {total}\n"
    assert run(MAPPED, file, "library").stdout == f"True {total}\n"


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + (
    b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}'
)
MANY = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % b",".join([b"1"] * 1000)
MORE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}'


@pytest.mark.parametrize("header", [TWICE, MANY, MORE], ids=["twice", "dims", "unknown key"])
def test_the_library_takes_headers_that_mean_two_things_or_none(
    tmp_path: Path, header: bytes
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with safe_open(path, "pt") as taken:
        assert list(taken.keys()) == ["a"]
    with pytest.raises(CheckpointError, match="a"):
        read_header(path)


def test_the_library_writes_only_tensors_that_are_whole_in_memory(tmp_path: Path) -> None:
    part = torch.ones(8, WIDTH)
    spec = TensorSpec(
        dtype="float32", shape=[16, WIDTH], data_ptr=part.data_ptr(), data_len=4 * part.numel()
    )
    with pytest.raises(SafetensorError):
        serialize_file({"w": spec}, tmp_path / "library.safetensors")
    path = tmp_path / "ours.safetensors"
    with TensorWriter(path, {"w": TensorEntry("F32", (16, WIDTH))}) as writer:
        writer.write("w", 2 * part, first_byte=4 * part.numel())
        writer.write("w", part)
    assert torch.equal(load_file(path)["w"], torch.cat([part, 2 * part]))
    with TensorFile(path) as tensors:
        assert torch.equal(tensors.read_rows("w", range(8, 16)), 2 * part)
