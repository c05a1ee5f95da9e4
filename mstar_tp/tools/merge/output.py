"""The files of a merged model: which tensors go where, and what else is copied. No torch.

Shards are filled in the base's order; one that would grow past the limit ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mstar_tp.common.errors import CheckpointError
from mstar_tp.models.checkpoint import INDEX_FILE, SINGLE_FILE
from mstar_tp.models.config.config_keys import read_json
from mstar_tp.tensor_files.writer import TensorEntry

CONFIG_FILE = "config.json"
_COPIED_ENDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_COPIED_STARTS = ("LICENSE", "LICENCE", "NOTICE")
_LEFT_OUT = (CONFIG_FILE, "adapter_config.json")
_COPIED_FOLDERS = ("additional_chat_templates",)


class Shard(NamedTuple):
    """One file of weights."""

    name: str
    tensors: dict[str, TensorEntry]


def pack_shards(tensors: Mapping[str, TensorEntry], max_bytes: int) -> list[Shard]:
    """The file that each tensor goes to; one larger than the limit has a file of its own."""
    groups: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, entry in tensors.items():
        if groups[-1] and size + entry.num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.num_bytes
    if len(groups) == 1:
        return [Shard(SINGLE_FILE, groups[0])]
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    return [Shard(name, group) for name, group in zip(names, groups, strict=True)]


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """The index of several shards; a single file needs none."""
    if len(shards) == 1:
        return
    total = sum(entry.num_bytes for shard in shards for entry in shard.tensors.values())
    homes = {name: shard.name for shard in shards for name in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def other_files(model: Path) -> list[Path]:
    """Files of the base model that the merged one needs as they are.

    They are the tokenizer, templates, generation settings and the licence.
    """
    found = []
    for path in sorted(model.iterdir()):
        if path.name in _COPIED_FOLDERS and path.is_dir():
            found += [inner for inner in sorted(path.iterdir()) if inner.is_file()]
        if not path.is_file() or path.name in _LEFT_OUT or path.name.endswith(".index.json"):
            continue
        if path.name.endswith(_COPIED_ENDS) or path.name.startswith(_COPIED_STARTS):
            found.append(path)
    return found


def copy_files(model: Path, paths: Sequence[Path], folder: Path) -> None:
    for path in paths:
        to = folder / path.relative_to(model)
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to)


def write_config(model: Path, folder: Path, *, dtype: str | None, untied: bool) -> None:
    """The base's config.json; with another ``dtype``, and with the head untied where it is.

    Raises:
        CheckpointError: it can no longer be read.
    """
    tree: Any = read_json(model / CONFIG_FILE)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{model / CONFIG_FILE}: wanted a JSON object")
    if dtype is not None:
        _set_dtype(tree, dtype)
    if untied:
        _untie(tree)
    (folder / CONFIG_FILE).write_text(
        json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _set_dtype(tree: dict[str, Any], dtype: str) -> None:
    for part in (tree, *(value for value in tree.values() if isinstance(value, dict))):
        found = [key for key in ("dtype", "torch_dtype") if key in part]
        for key in found or (["dtype"] if part is tree else []):
            part[key] = dtype


def _untie(tree: dict[str, Any]) -> None:
    tree["tie_word_embeddings"] = False
    for value in tree.values():
        if isinstance(value, dict) and "tie_word_embeddings" in value:
            value["tie_word_embeddings"] = False
