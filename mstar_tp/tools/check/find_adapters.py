"""The adapters that a path holds: one, or a folder of many.

No torch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.adapter_files import INDEX_NAME, WEIGHTS_NAME
from mstar_tp.lora.format.peft_config import CONFIG_NAME
from mstar_tp.models.config.config_keys import read_json

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


class Found(NamedTuple):
    """(name, path) of each adapter, and the names of what was passed over."""

    adapters: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...] = ()


def is_model(path: Path) -> bool:
    """True if ``path`` is the folder of a base model."""
    config = path / "config.json"
    if not os.path.isfile(config) or os.path.exists(path / CONFIG_NAME):
        return False
    return "architectures" in read_json(config)


def find_adapters(path: Path) -> Found:
    """The adapter at ``path``, or all those in the folder ``path``.

    A folder's adapters are its folders that hold anything of an adapter, and its weight files.

    Raises:
        AdapterError: there is nothing at ``path``, or it may not be looked at.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return Found(((path.name, str(path)),))
        entries = sorted(path.iterdir(), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise AdapterError(f"{path}: cannot be looked at: {error.strerror}") from None
    names = {entry.name for entry in entries}
    if names & {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME}:
        return Found(((path.resolve().name, str(path)),))
    files = [entry for entry in entries if entry.suffix in _WEIGHTS and os.path.isfile(entry)]
    folders = [
        entry for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry)
    ]
    held = [folder for folder in folders if _holds_adapter(folder)]
    if not held and len(files) <= 1:
        return Found(((path.resolve().name, str(path)),))
    found = sorted([*held, *files])
    skipped = [folder.name for folder in folders if folder not in held]
    return Found(tuple((entry.name, str(entry)) for entry in found), tuple(skipped))


def _holds_adapter(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return True  # for all that anybody knows: its refusal says why
    return any(
        name in (CONFIG_NAME, INDEX_NAME) or os.path.splitext(name)[1] in _WEIGHTS for name in names
    )
