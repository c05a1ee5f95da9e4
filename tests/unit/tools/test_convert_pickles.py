"""Pins that a pickle can do nothing but be refused or give its tensors: no code of it runs, no file
is touched, memory and time follow from its size, and whoever converts it lives on.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar_tp.cli.main import main
from mstar_tp.tools.convert import pickles, unpickler
from mstar_tp.tools.convert.unpickler import RefusedError, read_tensors

DEEP = 20_000


def saved(value: object, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def archive(data: bytes, storage: bytes = b"", packing: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save would write around a pickle of its own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as parts:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("data/0", storage)):
            parts.writestr(f"x/{name}", content)
        parts.writestr("x/byteorder", "little")
    return file.getvalue()


class _Storages(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None


def tensor(stored: int, size: int, stride: int, *rest: object) -> bytes:
    """A pickle of one tensor that says what it likes about its storage."""

    class Tensor:
        def __reduce__(self) -> Any:
            storage = ("storage", torch.FloatStorage, "0", "cpu", stored, *rest)
            args = (storage, 0, (size,), (stride,), False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, args  # type: ignore[attr-defined]

    file = io.BytesIO()
    _Storages(file, 2).dump({"w": Tensor()})
    return file.getvalue()


class Payload:
    """Makes a file when it is unpickled by whoever runs what a pickle says."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"no pickle at all", "is no pickle, nor what torch.save writes"),
    "truncated": (lambda: saved({"w": torch.ones(99)})[:-300], "is damaged"),
    "truncated, old format": (
        lambda: saved({"w": torch.ones(99)}, zipped=False)[:-300],
        "unexpected EOF|cannot|is no pickle",
    ),
    "newer pickle": (lambda: pickle.dumps({"w": 1}, 5), "is no pickle of tensors|magic number"),
    "whole module": (lambda: saved(torch.nn.Linear(2, 2)), "wants torch.nn.modules.linear.Linear"),
    "list": (lambda: saved([torch.ones(2)]), "holds a list, wanted tensors by name"),
    "number": (lambda: saved({"epoch": 3}), "holds epoch of type int"),
    "numbered": (lambda: saved({3: torch.ones(2)}), "has the key 3"),
    "nested": (lambda: saved({"a": {"b": torch.ones(2)}}), "holds a of type dict"),
    "sparse": (lambda: saved({"w": torch.eye(3).to_sparse()}), "sparse_coo"),
    "complex": (lambda: saved({"w": torch.ones(2) * 1j}), "complex64"),
    "on no device": (lambda: saved({"w": torch.ones(2, device="meta")}), "w|is no pickle"),
    "compressed": (
        lambda: archive(tensor(1 << 20, 1 << 20, 1), bytes(4 << 20), zipfile.ZIP_DEFLATED),
        "compressed, which torch.save never does",
    ),
    "a storage that is not there": (
        lambda: archive(tensor(1 << 36, 1 << 36, 1), bytes(16)),
        "record size|does not match",
    ),
    "one number repeated": (
        lambda: archive(tensor(4, 1 << 40, 0), bytes(16)),
        "declares 4398046511104 bytes of tensors",
    ),
    "past its storage": (lambda: archive(tensor(4, 1 << 20, 1), bytes(16)), "resize"),
    "deep": (lambda: archive(b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."), "holds a list"),
    "deep tuples": (lambda: archive(b"\x80\x02)" + b"\x85" * DEEP + b"."), "holds a tuple"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_pickle_of_tensors_is_refused(name: str) -> None:
    make, said = BAD[name]
    data = make()
    # The process around it turns what torch raises into a refusal of these words.
    with pytest.raises((RefusedError, RuntimeError, EOFError), match=said):
        read_tensors(io.BytesIO(data), len(data))


def convert(source: Path, out: Path) -> int:
    return main(["convert", str(source), "--out", str(out)])


def test_a_pickle_that_would_run_code_runs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, source = tmp_path / "ran", tmp_path / "adapter_model.bin"
    source.write_bytes(saved({"w": Payload(marker)}))
    assert convert(source, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert f"{source}: wants posix.mkdir to be called, which is no tensor" in said
    assert "weights_only" not in said
    old = saved({"w": Payload(marker)}, zipped=False)
    with pytest.raises(RefusedError, match=r"wants posix\.mkdir to be called"):
        read_tensors(io.BytesIO(old), len(old))
    assert os.listdir(tmp_path) == ["adapter_model.bin"]
    # Read as people used to, it would have run.
    torch.load(source, weights_only=False)
    assert marker.exists()


def test_a_pipe_or_device_in_a_files_place_is_refused_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a"
    source.mkdir()
    os.mkfifo(source / "adapter_model.bin")
    assert convert(source, tmp_path / "out") == 1
    assert "adapter_model.bin: is not a regular file" in capsys.readouterr().err
    (source / "adapter_model.bin").unlink()
    (source / "adapter_model.bin").write_bytes(saved({"w": torch.ones(1)}))
    (source / "adapter_config.json").symlink_to("/dev/zero")
    assert convert(source, tmp_path / "out") == 1
    assert "adapter_config.json: is not a regular file" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a"]


def test_memory_follows_from_the_size_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old format says how large a storage is before it comes."""
    source = tmp_path / "x.pt"
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    head += pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    source.write_bytes(head + tensor(1 << 32, 1 << 32, 1, None) + pickle.dumps(["0"], 2) + bytes(9))
    assert convert(source, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert f"{source}: needs more memory than a file of its size should" in said


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((b"", -signal.SIGSEGV), "ended with signal 11 and said nothing"),
        ((b"", 1), "ended with exit code 1"),
        ((b"{", 0), "said nothing"),
        ((b"[]", 0), "said nothing"),
        ((b"", -signal.SIGXCPU), "takes longer to read than a file of its size should"),
        ((b'{"refused": "a\\u001b[31m\\nb"}', 0), "x.pt: a\\x1b[31m\\nb"),
        ((b"{}", 0), "is empty"),
    ],
)
def test_however_the_reading_process_ends_it_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: tuple[bytes, int],
    said: str,
) -> None:
    def run(source: Path, target: Path) -> tuple[bytes, int]:
        target.touch()
        return ended

    monkeypatch.setattr(pickles, "_run", run)
    (tmp_path / "x.pt").write_bytes(b"what the process was given")
    assert convert(tmp_path / "x.pt", tmp_path / "out") == 1
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.pt"]


CONFINED = """
import ctypes, os, socket, sys
from mstar_tp.tools.convert.unpickler import confine
confine(ctypes.CDLL(None, use_errno=True), 1000)
tries = {
    "read": lambda: open(sys.argv[1] + "/kept").close(),
    "write": lambda: open(sys.argv[1] + "/new", "w").close(),
    "remove": lambda: os.unlink(sys.argv[1] + "/kept"),
    "folder": lambda: os.mkdir(sys.argv[1] + "/folder"),
    "rename": lambda: os.rename(sys.argv[1] + "/kept", sys.argv[1] + "/moved"),
    "socket": lambda: socket.socket(),
    "memory": lambda: bytearray(1 << 30),
}
for name, attempt in tries.items():
    try:
        attempt()
        print("could", name)
    except (OSError, MemoryError):
        pass
print("tried")
"""


def test_limits_that_a_shell_has_set_already_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(unpickler, "_forbid_files", lambda libc: None)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (9, 9))
    monkeypatch.setattr(resource, "setrlimit", lambda limit, both: asked.update({limit: both}))
    unpickler.confine(None, 1000)
    limits = {resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE}
    assert {asked[limit] for limit in limits} == {(9, 9)}, "nobody may raise a hard limit"


def test_the_reading_process_can_touch_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    command = [sys.executable, "-c", CONFINED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    could = set(ended.stdout.split("\n")) - {"", "tried"}
    assert "tried" in ended.stdout, ended.stderr
    # Removing and making folders takes Landlock, which old kernels lack.
    assert could <= {"could remove", "could folder", "could rename"}
    if not could:
        assert os.listdir(tmp_path) == ["kept"]
