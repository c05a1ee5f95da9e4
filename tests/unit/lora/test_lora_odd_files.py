"""What lies in an adapter's folder may be no file, not be readable, or change meanwhile: the answer
names it, nothing waits on it, and no descriptor is left open.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.adapter_kit import Q0, SPEC, load, refusal

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.batch_checks import AdapterChecker
from mstar_tp.lora.reading import shards
from mstar_tp.tensor_files.reader import TensorFile
from mstar_tp.testing.lora_files import pair, q_pairs, write_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
SHARD = "adapter_model-00001-of-00001.safetensors"


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a socket": bind_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    folder = write_adapter(Path("x"), q_pairs(SPEC))
    (folder / name).unlink()
    KINDS[kind](folder / name)
    before = open_files()
    text = refusal(folder)
    assert name in text and "Errno" not in text
    assert open_files() == before


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_file_that_may_not_be_read_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    opened = os.open

    def forbidding(path: os.PathLike[str], *how: int) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *how)

    monkeypatch.setattr(os, "open", forbidding)
    assert f"{folder / name}: cannot be read: Permission denied" in refusal(folder)
    with pytest.raises(AdapterError, match="Permission denied"):
        AdapterChecker(SPEC).check("x", folder)


def test_names_that_are_no_text_hurt_nobody(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "ünïcode\nline", q_pairs(SPEC))
    wanted = load(folder).digest
    with open(os.fsencode(folder) + b"/\xff\xfe.txt", "wb") as file:
        file.write(b"x")
    assert AdapterChecker(SPEC).check("x", folder).modules
    assert load(folder).digest == wanted
    (folder / WEIGHTS).write_bytes(b"")
    assert "is empty" in refusal(folder)
    other = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(folder, other)
    assert "is empty" in refusal(other)


@pytest.mark.parametrize(
    "home",
    ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "\ud800.safetensors",
     "a\0.safetensors", "a\nb.safetensors", "..", "", "x.bin", None, 3],
)  # fmt: skip
def test_a_shard_lies_beside_its_index_under_a_plain_name(tmp_path: Path, home: object) -> None:
    folder = write_adapter(tmp_path / "x", q_pairs(SPEC))
    # What a path that is followed would find.
    shutil.copy(folder / WEIGHTS, tmp_path / "x.safetensors")
    (folder / WEIGHTS).rename(folder / SHARD)
    homes: dict[str, object] = dict.fromkeys(q_pairs(SPEC), SHARD)
    homes[f"{Q0}.lora_A.weight"] = home
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))
    text = refusal(folder)
    assert INDEX in text and f"{Q0}.lora_A.weight" in text and "in the same folder" in text


def test_an_index_of_more_files_than_may_be_open_opens_none_of_them(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    (folder / WEIGHTS).unlink()
    names = [f"adapter_model-{n}.safetensors" for n in range(101)]
    for name in names:
        (folder / name).touch()
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"k{n}": n for n in names}}))
    assert f"{folder / INDEX}: lists 101 files, wanted at most 100" in refusal(folder)


def test_a_key_that_the_index_names_twice_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, pair(Q0, 8, 8))
    (folder / WEIGHTS).rename(folder / SHARD)
    keys = [*pair(Q0, 8, 8), f"{Q0}.lora_A.weight"]
    entries = ", ".join(f'"{key}": "{SHARD}"' for key in keys)
    (folder / INDEX).write_text(f'{{"weight_map": {{{entries}}}}}')
    text = refusal(folder)
    assert INDEX in text and f"names '{Q0}.lora_A.weight' twice" in text


def test_a_scalar_that_is_said_to_be_huge_is_not_read(tmp_path: Path) -> None:
    """The file is sparse: it has the bytes, and reading them would take all memory."""
    size = 1 << 42
    header = {
        "lora_te_model_layers_0_self_attn_q_proj.alpha": {
            "dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]
        }
    }  # fmt: skip
    raw = json.dumps(header).encode()
    path = tmp_path / "kohya.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + size)
    text = refusal(path)
    assert "alpha is F32" in text and "wanted one number" in text


@pytest.mark.parametrize("how", ["put in its place", "written over", "cut short"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    weights = write_adapter(tmp_path, q_pairs(SPEC)) / WEIGHTS
    other = write_adapter(tmp_path / "other", q_pairs(SPEC, a=0.7)) / WEIGHTS
    read = shards._Reader.read

    def changing(self: shards._Reader, *stored: object) -> torch.Tensor:
        tensor = read(self, *stored)  # type: ignore[arg-type]
        if how == "put in its place":
            os.replace(other, weights) if other.exists() else None
        elif how == "written over":
            weights.write_bytes(other.read_bytes())
        else:
            os.truncate(weights, weights.stat().st_size - 300)
        return tensor

    monkeypatch.setattr(shards._Reader, "read", changing)
    text = refusal(tmp_path)
    assert str(weights) in text
    assert "changed while it was read" in text or "something shrank it" in text


def test_an_overflow_in_the_served_dtype_names_file_and_key(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC, b=1e38), lora_alpha=1e10)
    text = refusal(folder)
    assert f"{folder / WEIGHTS}: {Q0}.lora_B.weight times 5e+09 in torch.float32" in text
    assert "not finite" in text


def test_a_header_that_nests_a_thousand_deep_is_refused_with_its_file(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, q_pairs(SPEC)) / WEIGHTS
    for depth in (100, *range(850, 1000)):
        raw = b'{"x": {"dtype": %s%s, "shape": [], "data_offsets": [0, 0]}}'
        raw = raw % (b"[" * depth, b"]" * depth)
        weights.write_bytes(struct.pack("<Q", len(raw)) + raw)
        text = refusal(tmp_path)
        assert str(weights) in text and len(text) < 500


def test_opening_a_socket_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bind_socket(Path("s"))
    with pytest.raises(AdapterError, match="s: is not a regular file"):
        TensorFile("s", error=AdapterError)
