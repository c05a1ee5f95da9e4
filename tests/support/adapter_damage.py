"""Damaged adapter folders, drawn at random but aware of what the files mean.

A good adapter is taken apart (header entries, settings, index, bytes), one to three things in it
are changed, and it is written again. Headers are kept as lists of pairs, so that they can name a
key twice, and numbers as text where no parser would write them.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mstar_tp.lora.format.adapter_files import INDEX_NAME, WEIGHTS_NAME
from mstar_tp.lora.format.peft_config import CONFIG_NAME
from support.no_files import NO_FILES

SETTINGS = tuple(
    """
    peft_type task_type r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights
    target_modules exclude_modules layers_to_transform layers_pattern lora_bias modules_to_save
    trainable_token_indices ensure_weight_tying fan_in_fan_out bias use_dora target_parameters
    alora_invocation_tokens layer_replication use_qalora use_bdlora arrow_config kasa_config
    monteclora_config inference_mode peft_version revision loftq_config
    """.split()
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1.5, "", "x", "true", "2", [], {}, [[]], [None], [0], [-1],
    ["q_proj"],
    {"a": 1}, {"q_proj": None}, {"": 2}, {"q_proj": [2]}, float("nan"), float("inf"), 1 << 31,
    10**30, 10**400,
    1e308, "\ud800", "\0", "a\nINFO all is well", "(a+)+$", "." * 190, ".*.*.*.*", "(" * 50,
    ["x" * 100_000],
    {str(n): n for n in range(2000)}, [*range(5000)],
)  # fmt: skip
DTYPES = (
    "F32",
    "F16",
    "BF16",
    "F64",
    "I32",
    "I8",
    "BOOL",
    "F8_E4M3",
    "f32",
    "F31",
    "",
    "C64",
    "F4",
    "I64",
)


@dataclass
class Parts:
    """An adapter folder taken apart.

    ``entries`` are the header's (name, entry) pairs; ``other`` are files beside the three, by name.
    """

    entries: list[tuple[str, Any]]
    body: bytes
    config: dict[str, Any] | None
    other: dict[bytes, bytes] = field(default_factory=dict)
    header_length: int | None = None
    """The length that the file gives instead of the header's."""
    raw_header: bytes | None = None
    raw_config: bytes | None = None
    cut: int | None = None
    """Only so many bytes of the weights' file are written."""
    tail: bytes = b""
    index: Any = None
    """The index; where there is one, the weights are its first shard."""
    fixtures: list[Callable[[Path], None]] = field(default_factory=list)
    """The changes made to the written folder."""


class Damage(NamedTuple):
    """A damage to a folder: ``names`` of the changes, and the setting to blame, if it is known."""

    names: tuple[str, ...]
    setting: str | None


def take_apart(folder: Path) -> Parts:
    """The parts of a good adapter of one weights file."""
    data = (folder / WEIGHTS_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    config = folder / CONFIG_NAME
    return Parts(
        entries=list(json.loads(data[8 : 8 + length]).items()),
        body=data[8 + length :],
        config=json.loads(config.read_text()) if config.exists() else None,
    )


def damage(parts: Parts, folder: Path, source: random.Random) -> Damage:
    """Write the adapter with one to three random changes into ``folder``, which is empty.

    ``parts`` is spent.
    """
    names, setting = [], None
    count = source.choice((1, 1, 1, 2, 3))
    for _ in range(count):
        change = source.choice(_CHANGES)
        blamed = change(parts, source)
        names.append(f"{change.__name__.removeprefix('_')}{f' {blamed}' if blamed else ''}")
        setting = blamed if count == 1 else None
    write(parts, folder)
    return Damage(tuple(names), setting)


def write(parts: Parts, folder: Path) -> None:
    """Put the parts together again."""
    raw = parts.raw_header
    if raw is None:
        pairs = (f"{_json(name)}: {_json(entry)}" for name, entry in parts.entries)
        raw = ("{" + ", ".join(pairs) + "}").encode("utf-8", "surrogatepass")
    length = len(raw) if parts.header_length is None else parts.header_length
    data = struct.pack("<Q", length % (1 << 64)) + raw + parts.body + parts.tail
    name = WEIGHTS_NAME if parts.index is None else "adapter_model-00001-of-00001.safetensors"
    (folder / name).write_bytes(data[: parts.cut])
    if parts.index is not None:
        (folder / INDEX_NAME).write_bytes(_json(parts.index).encode("utf-8", "surrogatepass"))
    if parts.raw_config is not None:
        (folder / CONFIG_NAME).write_bytes(parts.raw_config)
    elif parts.config is not None:
        text = _json(parts.config)
        (folder / CONFIG_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    for other, content in parts.other.items():
        with open(os.path.join(os.fsencode(folder), other), "wb") as file:
            file.write(content)
    for fixture in parts.fixtures:
        fixture(folder)


class Literal(str):
    """Written as it is, where JSON has a value."""


def _json(value: Any) -> str:
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(k)}: {_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value)


# ---------------------------------------------------------------------- changes of a header


def _tensor(parts: Parts, source: random.Random) -> tuple[int, str, Any]:
    at = source.randrange(len(parts.entries))
    name, entry = parts.entries[at]
    return at, name, entry


def _entry_field(parts: Parts, source: random.Random) -> None:
    """A field of an entry gets a value of another kind."""
    _, _, entry = _tensor(parts, source)
    if isinstance(entry, dict) and entry:
        entry[source.choice(sorted(entry))] = source.choice(ODD_VALUES)


def _entry_number(parts: Parts, source: random.Random) -> None:
    """One size or offset becomes another number, or no number."""
    _, _, entry = _tensor(parts, source)
    numbers = (
        [v for v in (entry or {}).values() if isinstance(v, list) and v]
        if isinstance(entry, dict)
        else []
    )
    if numbers:
        values = source.choice(numbers)
        at = source.randrange(len(values))
        old = values[at] if type(values[at]) is int else 0
        values[at] = source.choice(
            [0, -1, old + 1, old - 1, old * 2, 1 << 31, 1 << 63, 1 << 64, 10**25, 2.0, True, None,
            "1",
             Literal("NaN"), Literal("-Infinity"), Literal("1e999"), Literal("9" * 5000),
             Literal("00"), [1]]
        )  # fmt: skip


def _entry_shape(parts: Parts, source: random.Random) -> None:
    """The same elements in a shape of another rank."""
    _, _, entry = _tensor(parts, source)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if isinstance(shape, list) and shape and all(type(size) is int for size in shape):
        total = 1
        for size in shape:
            total *= size
        first = shape[0]
        entry["shape"] = source.choice(
            [[total], [1, *shape], [*shape, 1], [*shape, 1, 1], [first, 1, total // max(first, 1)],
             [first, total // max(2 * first, 1), 2], shape[::-1], [*shape, 0], [], [*([1] * 20),
             *shape]]
        )  # fmt: skip


def _entry_empty(parts: Parts, source: random.Random) -> None:
    """A tensor loses its bytes; the others move up."""
    at, _, entry = _tensor(parts, source)
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (
        isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)
    ):
        return
    start, end = offsets
    parts.body = parts.body[:start] + parts.body[end:]
    for number, (_, other) in enumerate(parts.entries):
        places = other.get("data_offsets") if isinstance(other, dict) else None
        if isinstance(places, list) and all(type(o) is int for o in places):
            other["data_offsets"] = [o - (end - start) if o >= end else o for o in places]
        if number == at and isinstance(other, dict):
            other["shape"] = source.choice([[0], [0, 8], [2, 0], [0, 0, 0]])


def _entry_dtype(parts: Parts, source: random.Random) -> None:
    _, _, entry = _tensor(parts, source)
    if isinstance(entry, dict):
        entry["dtype"] = source.choice(DTYPES)


def _entry_overlap(parts: Parts, source: random.Random) -> None:
    """Two tensors share their bytes."""
    _, _, entry = _tensor(parts, source)
    _, _, other = _tensor(parts, source)
    if isinstance(entry, dict) and isinstance(other, dict):
        entry["data_offsets"] = other.get("data_offsets")


def _entry_swap(parts: Parts, source: random.Random) -> None:
    """Two entries change names."""
    a, b = source.randrange(len(parts.entries)), source.randrange(len(parts.entries))
    (name_a, entry_a), (name_b, entry_b) = parts.entries[a], parts.entries[b]
    parts.entries[a], parts.entries[b] = (name_b, entry_a), (name_a, entry_b)


def _entry_repeat(parts: Parts, source: random.Random) -> None:
    _, name, entry = _tensor(parts, source)
    parts.entries.insert(source.randrange(len(parts.entries)), (name, entry))


def _entry_gone(parts: Parts, source: random.Random) -> None:
    if len(parts.entries) > 1:
        del parts.entries[source.randrange(len(parts.entries))]


def _entry_new(parts: Parts, source: random.Random) -> None:
    """A tensor of no bytes at the end."""
    name = _odd_key(parts.entries[0][0], source)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [len(parts.body)] * 2}
    parts.entries.append((name, source.choice([entry, None, [], 3, {}, "x"])))


def _key(parts: Parts, source: random.Random) -> None:
    at, name, entry = _tensor(parts, source)
    parts.entries[at] = (_odd_key(name, source), entry)


def _odd_key(name: str, source: random.Random) -> str:
    words = name.split(".")
    at = source.randrange(len(words))
    match source.randrange(10):
        case 0:
            words[at] = source.choice(
                ["", "0", "-1", "01", "1e0", "99", "\u0660", "\uff19", "1" * 400, "Q_PROJ",
                "layers", "..",
                 "\ud800", "\0", "\n", "lora_A", "lora_B", "default", "experts", "weight", "bias",
                 "alpha", " "]
            )  # fmt: skip
        case 1:
            del words[at]
        case 2:
            words.insert(at, words[at])
        case 3:
            words.reverse()
        case 4:
            words = ["x" * source.choice((10, 600, 100_000)), *words]
        case 5:
            words = words[at:]
        case 6:
            words = ["base_model", "model", "_orig_mod", *words]
        case 7:
            name = ".".join(words)
            place = source.randrange(len(name) + 1)
            return name[:place] + source.choice("._/\\ \t\u202e\x7fé") + name[place:]
        case 8:
            return source.choice(
                ["__metadata__", "", ".", "../../etc/passwd", "lora_te_.lora_down.weight"]
            )
        case 9:
            return ".".join(words).swapcase()
    return ".".join(words)


def _metadata(parts: Parts, source: random.Random) -> None:
    value = source.choice([*ODD_VALUES, {"lora_adapter_metadata": source.choice(
        ["", "{", "[]", "{}", '{"text_encoder.r": 2}', "[" * 3000, "9" * 5000, "\ud800",
        '{"a": NaN, "a": 1}']
    )}, {"ss_network_args": "rs_lora"}])  # fmt: skip
    parts.entries = [("__metadata__", value), *(e for e in parts.entries if e[0] != "__metadata__")]


def _header_length(parts: Parts, source: random.Random) -> None:
    parts.header_length = source.choice(
        [0, 1, 7, 8, len(parts.body), 1 << 20, 32 << 20, 1 << 31, (1 << 63) - 1, 1 << 63, -1,
        source.randrange(4000)]
    )  # fmt: skip


def _header_bytes(parts: Parts, source: random.Random) -> None:
    parts.raw_header = source.choice(
        [b"", b"{}", b"[]", b"null", b"{" * 60, b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900,
         b'{"x": {"dtype": ' + b"[" * 900 + b"]" * 900 + b', "shape": [], "data_offsets": [0, 0]}}',
         b'\xef\xbb\xbf{}', b'{"\xff": {}}', b'{"a": ' + b"9" * 5000 + b"}", b" {}",
         b"{}" + b" " * 3, b"\0" * 50,
         b'{"a": {}, "a": {}}', b'{"__metadata__": {"a": "b"}}', b'{"a": NaN}',
         "{'a': 1}".encode("utf-16")]
    )  # fmt: skip


# ---------------------------------------------------------------------- changes of bytes


def _truncated(parts: Parts, source: random.Random) -> None:
    """At the end of a tensor, of the header, of the length, or anywhere."""
    size = len(json.dumps(dict(parts.entries), default=str)) + 8
    ends = [0, 1, 7, 8, 9, size - 1, size, size + 1]
    for _, entry in parts.entries:
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list):
            ends += [size + o for o in offsets if type(o) is int and 0 <= o < 1 << 40]
    parts.cut = source.choice([*ends, source.randrange(size + len(parts.body) + 1)])


def _bytes_more(parts: Parts, source: random.Random) -> None:
    parts.tail = source.choice([b"\0", b"\0" * 8, b"x" * 4096, parts.body])


def _bits(parts: Parts, source: random.Random) -> None:
    body = bytearray(parts.body)
    for _ in range(source.randint(1, 5)):
        if body:
            at = source.randrange(len(body))
            body[at] ^= 1 << source.randrange(8)
    parts.body = bytes(body)


def _not_finite(parts: Parts, source: random.Random) -> None:
    at = source.randrange(max(1, len(parts.body) // 4)) * 4
    value = struct.pack("<f", source.choice([float("nan"), float("inf"), -float("inf"), 3e38]))
    parts.body = parts.body[:at] + value + parts.body[at + 4 :]


# ---------------------------------------------------------------------- changes of settings


def _setting(parts: Parts, source: random.Random) -> str | None:
    """Any setting gets any value. Known settings are blamed."""
    if parts.config is None:
        parts.config = {"peft_type": "LORA"}
        return None
    key = source.choice(SETTINGS)
    parts.config[key] = source.choice(ODD_VALUES)
    return key


def _setting_gone(parts: Parts, source: random.Random) -> None:
    if parts.config:
        del parts.config[source.choice(sorted(parts.config))]


def _setting_unknown(parts: Parts, source: random.Random) -> None:
    if parts.config is not None:
        name = source.choice(
            ["a_new_setting", "\ud800", "x" * 100_000, "", "R", "lora_alpha ", "modules_to_tie"]
        )
        parts.config[name] = source.choice(ODD_VALUES)


def _config_text(parts: Parts, source: random.Random) -> None:
    text = json.dumps(parts.config or {}).encode()
    at = source.randrange(len(text))
    parts.raw_config = source.choice(
        [b"", b"[]", b"null", b'"x"', b"3", b"{", b"[" * 100_000,
        b'{"r":' + b"[" * 900 + b"]" * 900 + b"}",
         b'{"peft_type": "LORA", "r": ' + b"[" * 950 + b"]" * 950 + b"}", b'{"peft_type": "\xff"}',
         b"\0" * 64,
         text[:at], text + text, text[:1] + b'"r": 2, ' + text[1:], b"\xef\xbb\xbf" + text,
         text.replace(b", ", b",\r\n"),
         text.replace(b"2", b"9" * 5000), text.decode().encode("utf-16"), b" " * (5 << 20),
         b"\xef\xbb\xbf",
         text[:at] + bytes([source.randrange(256)]) + text[at + 1 :]]
    )  # fmt: skip


# ---------------------------------------------------------------------- changes of the folder


def _index(parts: Parts, source: random.Random) -> None:
    shard = "adapter_model-00001-of-00001.safetensors"
    keys = [name for name, _ in parts.entries if name != "__metadata__"]
    homes: dict[str, Any] = dict.fromkeys(keys, shard)
    liar = source.choice(
        ["../x.safetensors", "/etc/passwd", "/dev/zero.safetensors", "a/b.safetensors",
        "nowhere.safetensors", "",
         INDEX_NAME, "\ud800.safetensors", "a\0.safetensors", "x" * 300 + ".safetensors",
         ".safetensors", None, 3,
         [shard], "..", CONFIG_NAME, WEIGHTS_NAME]
    )  # fmt: skip
    if keys:
        homes[source.choice(keys)] = liar
    many = {f"k{n}": f"adapter_model-{n}.safetensors" for n in range(3000)}
    parts.index = source.choice(
        [{"weight_map": homes}, {"weight_map": homes}, {"weight_map": many}, {"weight_map": []}, {},
        [], None,
         {"weight_map": dict.fromkeys(keys, shard)}, {"weight_map": {}},
         Literal('{"weight_map": {}, "weight_map": {}}')]
    )  # fmt: skip


def _stranger(parts: Parts, source: random.Random) -> None:
    """Another file in the folder."""
    name = source.choice(
        [b"\xff\xfe.txt", b"new\nline", b"adapter_model.bin", b"other.safetensors",
        b"adapter_model-x.safetensors",
         b"x" * 250, b"\xff.safetensors", "ünïcode".encode(),
         b"adapter_model.safetensors.index.json"]
    )  # fmt: skip
    parts.other[name] = source.choice([b"", b"x", b"{}", parts.body])


def _no_file(parts: Parts, source: random.Random) -> None:
    """Something else in the place of a file."""
    name = source.choice([WEIGHTS_NAME, CONFIG_NAME])
    replace = source.choice(NO_FILES)
    parts.fixtures.append(lambda folder: replace(folder / name))


Change = Callable[[Parts, random.Random], str | None]
_CHANGES: tuple[Change, ...] = (
    _entry_field, _entry_number, _entry_shape, _entry_empty, _entry_dtype, _entry_overlap,
    _entry_swap,
    _entry_repeat, _entry_gone, _entry_new, _key, _key, _metadata, _header_length, _header_bytes,
    _truncated,
    _bytes_more, _bits, _not_finite, _setting, _setting, _setting, _setting_gone, _setting_unknown,
    _config_text,
    _config_text, _index, _stranger, _no_file,
)  # fmt: skip
