"""The files that an adapter is made of, and their identity under their names.

Only safetensors files are opened: a pickle is named and left alone. No torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.common.strict_json import show
from mstar_tp.lora.format.config_file import read_json
from mstar_tp.lora.format.peft_config import CONFIG_NAME
from mstar_tp.tensor_files.reader import TensorFile, TensorInfo

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
MAX_HEADER_BYTES = 32 << 20
"""Header of an adapter file: room for every tensor of the largest models."""
MAX_SHARDS = 100
"""All files of an adapter are open at once while it is read."""

_SHARD = re.compile(r"adapter_model-.*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class FileIdentity(NamedTuple):
    """The facts that tell a file from another one under its name."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One file as it was when it was checked."""

    path: Path
    identity: FileIdentity
    header_hash: str


class ExpertPart(NamedTuple):
    """One expert's part of the factors of ``num_experts`` stacked experts.

    Where ``major``, it is the rows of A that stand together, an expert's behind another's; else
    every ``num_experts``-th column of B. ``whole`` is the header's entry.
    """

    expert: int
    num_experts: int
    major: bool
    whole: TensorInfo


class StoredTensor(NamedTuple):
    """One tensor: its key, its header's entry, and the number of the file that holds it. ``part``:
    only that is meant, and ``info`` gives its shape.
    """

    key: str
    info: TensorInfo
    file: int
    part: ExpertPart | None = None

    def of_expert(self, expert: int, count: int, *, major: bool) -> StoredTensor:
        """An expert's part of this whole tensor of two dims.

        The divided dim must be a multiple of ``count``, the number of experts.
        """
        rows, columns = self.info.shape
        shape = (rows // count, columns) if major else (rows, columns // count)
        assert count * math.prod(shape) == rows * columns, f"{self.key} has {rows}, {columns}"
        info = replace(self.info, shape=shape, num_bytes=self.info.num_bytes // count)
        return self._replace(info=info, part=ExpertPart(expert, count, major, self.info))

    @property
    def whole(self) -> StoredTensor:
        """The tensor that this is, or is a part of."""
        return self if self.part is None else StoredTensor(self.key, self.part.whole, self.file)


def take_part(whole: torch.Tensor, part: ExpertPart) -> torch.Tensor:
    """An expert's part of a tensor, dense."""
    if part.major:
        return whole.chunk(part.num_experts)[part.expert]
    return whole[:, part.expert :: part.num_experts].contiguous()


@dataclass(frozen=True, slots=True)
class Headers:
    """Everything the headers of an adapter's files say, read once."""

    folder: Path | None
    """The adapter's folder; None where the adapter is a lone file."""
    files: tuple[WeightsFile, ...]
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]

    @property
    def where(self) -> str:
        """The file, or the index of several, for messages."""
        first = self.files[0].path
        return str(first if len(self.files) == 1 else first.parent / INDEX_NAME)


def read_headers(path: Path, problems: Problems) -> Headers:
    """The headers of the adapter at ``path``, a folder or one safetensors file.

    Where ``problems`` were found, they are not all that the adapter has.

    Raises:
        AdapterError: there is no adapter, a file is damaged or none that is served, or shards and
            their index disagree; the file is named.
    """
    if path.is_file():
        _refuse_other_kinds(path)
        return _read(None, [path], None, problems)
    if not path.is_dir():
        raise AdapterError(
            f"{path}: no such folder: wanted one with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    names = sorted(entry.name for entry in path.iterdir())
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if INDEX_NAME in names or shards:
        return _read_sharded(path, names, shards, problems)
    if WEIGHTS_NAME in names:
        return _read(path, [path / WEIGHTS_NAME], None, problems)
    return _read(path, [path / _only_file(path, names)], None, problems)


def open_file(file: WeightsFile) -> TensorFile:
    """The file, opened, if it is still the one that was checked.

    Raises:
        AdapterError: it is not, or it cannot be opened.
    """
    tensors = TensorFile(file.path, error=AdapterError, max_header_bytes=MAX_HEADER_BYTES)
    if identify(file.path) != file.identity or header_hash(tensors.header) != file.header_hash:
        tensors.close()
        raise AdapterError(
            f"{file.path} has changed since it was loaded: load it again under its name"
        )
    return tensors


def identify(path: Path) -> FileIdentity:
    """The file's identity now."""
    entry = os.stat(path)
    return FileIdentity(entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns, entry.st_ino)


def header_hash(header: Mapping[str, TensorInfo]) -> str:
    """Hash of every tensor's name, dtype, shape and place in the file."""
    lines = [f"{n} {i.dtype} {i.shape} {i.start} {i.num_bytes}" for n, i in sorted(header.items())]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _only_file(folder: Path, names: list[str]) -> str:
    """The one safetensors file of a folder that has none under PEFT's name."""
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return found[0]
    if found:
        raise AdapterError(
            f"{folder}: holds {len(found)} safetensors files ({', '.join(found[:3])}...) and none "
            f"is {WEIGHTS_NAME}: name the file itself"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        _refuse_other_kinds(folder / pickles[0])
    raise AdapterError(
        f"{folder}: has no {WEIGHTS_NAME}: wanted a folder that PEFT saved an adapter in"
    )


def _refuse_other_kinds(path: Path) -> None:
    if path.name.endswith(PICKLES):
        raise AdapterError(
            f"{path}: {path.name} is a pickle, which can run code, and was not opened: "
            "convert it to safetensors with `mstar-tp convert`"
        )
    if not path.name.endswith(".safetensors"):
        raise AdapterError(f"{path}: is no .safetensors file: wanted that or an adapter's folder")


def _read(
    folder: Path | None, paths: list[Path], homes: dict[str, str] | None, problems: Problems
) -> Headers:
    """``homes``: key -> file name, as an index has it; None for a lone file."""
    before = len(problems)
    files: list[WeightsFile] = []
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for number, path in enumerate(paths):
        with problems:
            with TensorFile(path, error=AdapterError, max_header_bytes=MAX_HEADER_BYTES) as file:
                identity, header = identify(path), file.header
            files.append(WeightsFile(path=path, identity=identity, header_hash=header_hash(header)))
            metadata |= header.metadata
            for key, info in header.items():
                with problems:
                    _refuse_other_home(path, key, homes)
                tensors[key] = StoredTensor(key, info, number)
    if len(problems) > before:
        return Headers(folder, tuple(files), tensors, metadata)
    for key, home in (homes or {}).items():
        with problems:
            if key not in tensors:
                raise AdapterError(
                    f"{paths[0].parent / INDEX_NAME}: says {key} is in {home}, which does not "
                    "hold it"
                )
    return Headers(folder, tuple(files), tensors, metadata)


def _refuse_other_home(path: Path, key: str, homes: dict[str, str] | None) -> None:
    if homes is not None and homes.get(key) != path.name:
        raise AdapterError(
            f"{path}: holds {key}, which {INDEX_NAME} does not place there: the shards and "
            "their index are of different adapters"
        )


def _read_sharded(folder: Path, names: list[str], shards: list[str], problems: Problems) -> Headers:
    if WEIGHTS_NAME in names:
        also = INDEX_NAME if INDEX_NAME in names else shards[0]
        raise AdapterError(
            f"{folder}: holds both {WEIGHTS_NAME} and {also}: remove the one that is not the "
            "adapter"
        )
    if INDEX_NAME not in names:
        raise AdapterError(
            f"{folder}: holds {shards[0]}, but no {INDEX_NAME} that says what the shards are: "
            f"save the adapter as one {WEIGHTS_NAME}"
        )
    homes = _weight_map(folder / INDEX_NAME)
    listed = sorted(set(homes.values()))
    for name in shards:
        with problems:
            if name not in listed:
                raise AdapterError(f"{folder}: holds {name}, which {INDEX_NAME} does not list")
    return _read(folder, [folder / name for name in listed], homes, problems)


def _weight_map(path: Path) -> dict[str, str]:
    table: Any = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise AdapterError(f"{path}: weight_map is no mapping of tensors to files")
    for key, name in table.items():
        # A shard lies beside its index: a path that leads elsewhere is not followed.
        plain = isinstance(name, str) and Path(name).name == name and name.isprintable()
        if not plain or not name.endswith(".safetensors"):
            raise AdapterError(
                f"{path}: {key} is said to be in {show(name)}, wanted the name of a "
                ".safetensors file in the same folder"
            )
    count = len(set(table.values()))
    if count > MAX_SHARDS:
        raise AdapterError(
            f"{path}: lists {count} files, wanted at most {MAX_SHARDS}: save the adapter in fewer"
        )
    return table
