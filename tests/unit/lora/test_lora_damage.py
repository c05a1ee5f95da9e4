"""Damaged adapters: whatever bytes a folder holds, the answer is an adapter or one clear refusal.

Each case starts from a good adapter and breaks its header, its config, its index or its bytes, from
a list of known tricks and from random edits. Nothing may crash, hang, allocate more than the file
holds, or leave anything registered; what still loads must be finite and whole.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support.adapter_kit import FULL_SPEC as SPEC
from support.adapter_kit import Q0, load

from mstar_tp.common.errors import AdapterError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraReqConfig
from mstar_tp.testing.lora_files import q_pairs, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
A0, B0 = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
Edit = Callable[[Any], Any]


def good(folder: Path) -> Path:
    return write_adapter(folder, q_pairs(SPEC))


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    tree: dict[str, Any] = json.loads(data[8 : 8 + length])
    return tree, data[8 + length :]


def with_header(header: Any, body: bytes, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def edit_header(edit: Edit) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tree, body = header_of((folder / WEIGHTS).read_bytes())
        changed = edit(tree)
        (folder / WEIGHTS).write_bytes(with_header(tree if changed is None else changed, body))

    return damage


def edit_bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(edit((folder / WEIGHTS).read_bytes()))

    return damage


def set_config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tree = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**tree, **values}))

    return damage


def raw_config(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG).write_bytes(data) and None


def index(tree: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(tree))

    return damage


def rename_key(new: str) -> Edit:
    def edit(tree: dict[str, Any]) -> None:
        tree[new] = tree.pop(A0)

    return edit


def in_entry(key: str, **values: Any) -> Edit:
    return lambda tree: tree[key].update(values)


HEADERS: dict[str, Edit] = {
    "not an object": lambda tree: [1, 2],
    "a string": lambda tree: "x",
    "null": lambda tree: b"null",
    "not json": lambda tree: b"{" * 50,
    "deep": lambda tree: b'{"a":' * 20000 + b"1" + b"}" * 20000,
    "not utf-8": lambda tree: b'{"\xff\xfe": 1}',
    "a huge number": lambda tree: b'{"a": ' + b"9" * 5000 + b"}",
    "twice the same key": lambda tree: b'{"a": {}, "a": {}}',
    "an entry of another kind": lambda tree: {**tree, "x": 3},
    "an entry without a shape": lambda tree: tree[A0].pop("shape") and None,
    "an entry with more": in_entry(A0, extra=1),
    "an unknown dtype": in_entry(A0, dtype="F31"),
    "a dtype of another size": in_entry(A0, dtype="F64"),
    "an integer dtype": in_entry(A0, dtype="I32"),
    "a complex dtype": in_entry(A0, dtype="C64"),
    "a negative size": in_entry(A0, shape=[-2, 8]),
    "a size that overflows": in_entry(A0, shape=[1 << 62, 1 << 62]),
    "a fractional size": in_entry(A0, shape=[2.0, 8]),
    "a size of true": in_entry(A0, shape=[True, 16]),
    "many dims": in_entry(A0, shape=[1] * 40),
    "a shape of none": in_entry(A0, shape=None),
    "another shape of one size": in_entry(A0, shape=[8, 2]),
    "a flat shape": in_entry(A0, shape=[16]),
    "a scalar": in_entry(A0, shape=[], data_offsets=[0, 4]),
    "no elements": in_entry(A0, shape=[0, 8], data_offsets=[0, 0]),
    "offsets the wrong way round": in_entry(A0, data_offsets=[64, 0]),
    "offsets beyond the file": in_entry(A0, data_offsets=[1 << 40, (1 << 40) + 64]),
    "offsets that overlap": lambda tree: tree[A0].update(tree[B0]),
    "three offsets": in_entry(A0, data_offsets=[0, 32, 64]),
    "metadata of another kind": lambda tree: {"__metadata__": [1], **tree},
    "a key with a newline": rename_key("a\nINFO all is well\n.lora_A.weight"),
    "a key with half a character": rename_key("\ud800.lora_A.weight"),
    "a key of a megabyte": rename_key("a" * (1 << 20) + ".lora_A.weight"),
    "an empty key": rename_key(""),
    "a key of dots": rename_key("." * 200 + "lora_A.weight"),
    "a path for a key": rename_key("../../etc/passwd"),
    "a layer of many digits": rename_key(A0.replace("layers.0", "layers." + "1" * 400)),
    "a layer in other digits": rename_key(A0.replace("layers.0", "layers.\u0660")),
    "a negative layer": rename_key(A0.replace("layers.0", "layers.-1")),
    "another half": rename_key(A0.replace("lora_A", "lora_C")),
    "a prefix and nothing": rename_key("base_model.model.model.lora_A.weight"),
    "only a kohya prefix": rename_key("lora_te_.lora_down.weight"),
    "an embedding's half on a linear": rename_key(f"{Q0}.lora_embedding_A"),
    "a bias of another shape": rename_key(f"{Q0}.lora_B.bias"),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "a byte": lambda data: b"x",
    "seven bytes": lambda data: data[:7],
    "the length alone": lambda data: data[:8],
    "half a header": lambda data: data[:100],
    "no body": lambda data: data[: 8 + int.from_bytes(data[:8], "little")],
    "the last byte gone": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "another file behind it": lambda data: data + data,
    "a length of all ones": lambda data: b"\xff" * 8 + data[8:],
    "a length of nothing": lambda data: bytes(8) + data[8:],
    "a length one short": lambda data: struct.pack("<Q", len(data) - 8 + 1) + data[8:],
    "an LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    "a zip": lambda data: b"PK\x03\x04" + data,
    "a pickle": lambda data: b"\x80\x04\x95" + data,
    "text": lambda data: b"<html>404</html>",
    "zeros": lambda data: bytes(len(data)),
    "reversed": lambda data: data[::-1],
    "a NaN": lambda data: data[:-4] + struct.pack("<f", float("nan")),
    "an infinity": lambda data: data[:-4] + struct.pack("<f", float("-inf")),
}
CONFIGS: dict[str, Callable[[Path], None]] = {
    "empty": raw_config(b""),
    "a list": raw_config(b"[]"),
    "not utf-8": raw_config(b'{"peft_type": "\xff"}'),
    "deep": raw_config(b"[" * 100_000),
    "a huge number": raw_config(b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}"),
    "large": raw_config(b" " * (5 << 20)),
    "zeros": raw_config(bytes(100)),
    "r of ten to the four hundred": set_config(r=10**400),
    "alpha of ten to the four hundred": set_config(lora_alpha=10**400),
    "alpha of infinity": set_config(lora_alpha=float("inf")),
    "alpha of nan": set_config(lora_alpha=float("nan")),
    "alpha that overflows": set_config(lora_alpha=1e308),
    "alpha of a list": set_config(lora_alpha=[16]),
    "r of a float": set_config(r=2.0),
    "r of zero": set_config(r=0),
    "r below zero": set_config(r=-1),
    "r of another size": set_config(r=3),
    "patterns of a list": set_config(rank_pattern=["q_proj"]),
    "a pattern's rank of zero": set_config(rank_pattern={"q_proj": 0}),
    "a pattern's rank of text": set_config(rank_pattern={"q_proj": "2"}),
    "a pattern that backtracks": set_config(alpha_pattern={"(a+)+$": 4}),
    "a pattern of half a character": set_config(alpha_pattern={"\ud800": 4, "(": 1}),
    "rslora of text": set_config(use_rslora="yes"),
    "a setting of half a character": set_config(**{"\ud800": 1}),
    "a setting of a megabyte": set_config(unknown="a" * (1 << 20)),
    "targets of numbers": set_config(target_modules=[1]),
    "saved modules of text": set_config(modules_to_save="lm_head"),
    "tokens of text": set_config(trainable_token_indices=["1"]),
    "tokens by number": set_config(trainable_token_indices={"embed_tokens": 3}),
    "layers of text": set_config(layers_to_transform="all"),
    "an initialisation of a list": set_config(init_lora_weights=["pissa"]),
    "a bias of a list": set_config(bias=["none"]),
    "a type of a list": set_config(peft_type=["LORA"]),
}
INDEXES: dict[str, Any] = {
    "a list": [],
    "no map": {"metadata": {}},
    "a map of a list": {"weight_map": [A0]},
    "an empty map": {"weight_map": {}},
    "numbers for files": {"weight_map": {A0: 1}},
    "the parent": {"weight_map": {A0: "../x.safetensors"}},
    "a file that is not there": {"weight_map": {A0: "nowhere.safetensors"}},
    "the index itself": {"weight_map": {A0: f"{WEIGHTS}.index.json"}},
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"header: {name}": edit_header(edit) for name, edit in HEADERS.items()},
    **{f"bytes: {name}": edit_bytes(edit) for name, edit in BYTES.items()},
    **{f"config: {name}": damage for name, damage in CONFIGS.items()},
    **{f"index: {name}": index(tree) for name, tree in INDEXES.items()},
}


def outcome(path: Path) -> LoadedAdapter | str:
    """What loading comes to; any other error fails the test that asks."""
    try:
        return load(path, spec=SPEC)
    except AdapterError as error:
        return str(error)


def assert_readable(text: str, folder: Path) -> None:
    """One line that names the adapter and the file, and that any log and wire takes."""
    assert text.startswith("adapter 'x': ") and str(folder) in text
    assert text.isprintable() and text.encode("utf-8")
    assert len(text) < 3000 and "Error" not in text and "Traceback" not in text


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_in_one_readable_line(tmp_path: Path, name: str) -> None:
    DAMAGES[name](good(tmp_path))
    found = outcome(tmp_path)
    assert isinstance(found, str), f"{name}: served"
    assert_readable(found, tmp_path)


def test_there_are_sixty_damages_and_more() -> None:
    assert len(DAMAGES) >= 60


def test_random_edits_of_headers_and_configs_never_crash_a_check(tmp_path: Path) -> None:
    """Bits, bytes, runs and values: most are refused; what loads is finite and whole."""
    source = random.Random(0)
    weights, config = (good(tmp_path) / name for name in (WEIGHTS, CONFIG))
    originals = {path: path.read_bytes() for path in (weights, config)}
    head = 8 + int.from_bytes(originals[weights][:8], "little")
    refused = 0
    for _ in range(400):
        path = source.choice([weights, config])
        data = bytearray(originals[path])
        reach = head if path is weights else len(data)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(min(reach, len(data)))
            match source.randrange(5):
                case 0:
                    data[at] ^= 1 << source.randrange(8)
                case 1:
                    data[at] = source.randrange(256)
                case 2:
                    del data[at : at + source.randint(1, 30)]
                case 3:
                    data[at:at] = source.choice([b'"', b"0", b"9" * 20, b"{}", b"[", b"null", b","])
                case 4:
                    other = source.randrange(min(reach, len(data)))
                    data[at : at + 8] = data[other : other + 8]
        path.write_bytes(bytes(data))
        found = outcome(tmp_path)
        if isinstance(found, str):
            refused += 1
            assert_readable(found, tmp_path)
        else:
            tensors = [*found.a.values(), *found.b.values()]
            assert tensors and all(bool(tensor.isfinite().all()) for tensor in tensors)
        path.write_bytes(originals[path])
    assert refused > 200
    assert isinstance(outcome(tmp_path), LoadedAdapter)


def serve(
    pool: LoraAdapterPool, key: AdapterKey, path: str, landed: SimpleQueue[CopyIn]
) -> str | None:
    """Load an adapter and read it for a request; why that failed, with nothing left of it."""
    causes: SimpleQueue[str | None] = SimpleQueue()
    pool.loads.begin(key, path, lambda cause, *_: causes.put(cause))
    if (cause := causes.get(timeout=30)) is not None:
        pool.loads.abort(key)
        return cause
    assert pool.loads.commit(key, path) is None
    assert pool.ingest_request(0, LoraReqConfig(key)) is None
    report = landed.get(timeout=30)
    if report.cause is not None:
        pool.copy_in(report)
        pool.drop_copy(*pool.failed_copies()[0])
        pool.remove_request(0)
        assert pool.loads.unload(key)
        pool.loads.forget()
    return report.cause


@pytest.mark.parametrize("start", ["header: a negative size", "bytes: a NaN", "config: r of zero"])
def test_a_damaged_adapter_leaves_nothing_and_its_name_is_free(tmp_path: Path, start: str) -> None:
    torch.set_num_threads(1)
    landed: SimpleQueue[CopyIn] = SimpleQueue()
    pool = LoraAdapterPool(
        SPEC,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=landed.put,
    )
    key = AdapterKey("x", 1)
    DAMAGES[start](good(tmp_path / "bad"))
    before = pool.reports.debug_state()
    try:
        assert serve(pool, key, str(tmp_path / "bad"), landed) is not None
        assert pool.reports.debug_state() == before and pool.store.get(key) is None
        assert serve(pool, key, str(good(tmp_path / "good")), landed) is None
        copy = pool.store.get(key)
        assert copy is not None and copy.key == key
    finally:
        pool.close()
