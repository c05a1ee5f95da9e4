"""The folder whose subfolders are adapters, and marks that tell one content from another.

Only names, sizes and times are read, never a file. Every function blocks on the disk and is called
on a thread for that; nothing here is kept, so nothing needs a lock.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from mstar_tp.common.confined_files import lies_in
from mstar_tp.config import adapter_name_fault
from mstar_tp.frontend.adapters.served_models import TEXT_FILES

MAX_LISTED = 100_000
MAX_DEPTH = 4
"""The parts of the longest name that is listed."""
CONFIG_NAME = "adapter_config.json"

_OF_ADAPTERS = (".safetensors", ".safetensors.index.json")

FileMark = tuple[str, int, int, int, int]
"""The name, size in bytes, inode and times of change in ns of a file."""


class Folder(NamedTuple):
    """An adapter's folder as it is now."""

    path: str
    mark: tuple[FileMark, ...]
    """A value that changes when a file of the adapter is written, replaced, added or removed."""


class RootGoneError(OSError):
    """The root itself cannot be read, which says nothing about any adapter."""


class AdapterFolders:
    """The subfolders of one root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def look(self, name: str) -> Folder | None:
        """Return the folder called ``name``, or None where there is none with an adapter's files.

        Raises:
            RootGoneError: the root is not there.
        """
        path = None if not may_name(name) else os.path.join(self.root, *name.split("/"))
        mark = () if path is None else _mark(path)
        if path is not None and mark:
            return Folder(path, mark)
        if not os.path.isdir(self.root):
            raise RootGoneError(f"{self.root} cannot be read now")
        return None

    def names(self) -> list[str]:
        """Return the names of all adapters, sorted; at most ``MAX_LISTED``.

        Folders that a link leads to are listed where they lie in the root, and nothing below a link
        is.

        Raises:
            RootGoneError: the root is not there.
        """
        if not os.path.isdir(self.root):
            raise RootGoneError(f"{self.root} cannot be read now")
        found: list[str] = []
        waiting = [""]
        while waiting and len(found) < MAX_LISTED:
            prefix = waiting.pop()
            for name, linked in _subfolders(self.root, prefix):
                if _holds_adapter(os.path.join(self.root, name)):
                    found.append(name)
                if not linked and name.count("/") + 1 < MAX_DEPTH:
                    waiting.append(name)
        return sorted(found)[:MAX_LISTED]


def may_name(name: str) -> bool:
    """Return whether ``name`` can be an adapter's in the root: no part of it is hidden."""
    return adapter_name_fault(name) is None and not any(
        part.startswith(".") for part in name.split("/")
    )


def _subfolders(root: str, prefix: str) -> list[tuple[str, bool]]:
    """Return (name, whether it is a link) for each folder in ``prefix`` that may be named."""
    found = []
    try:
        with os.scandir(os.path.join(root, prefix)) as entries:
            for entry in entries:
                name = f"{prefix}/{entry.name}" if prefix else entry.name
                if not may_name(name) or not entry.is_dir():
                    continue
                linked = entry.is_symlink()
                if not linked or lies_in(os.path.realpath(entry.path), root):
                    found.append((name, linked))
    except OSError:  # gone meanwhile, or not to be listed: it holds nothing that could be served
        return []
    return found


def _holds_adapter(path: str) -> bool:
    try:
        return any(_belongs(name) and name not in TEXT_FILES for name in os.listdir(path))
    except OSError:
        return False


def _belongs(name: str) -> bool:
    return name == CONFIG_NAME or name in TEXT_FILES or name.endswith(_OF_ADAPTERS)


def _mark(path: str) -> tuple[FileMark, ...]:
    """Return the marks of the adapter's files, sorted; none where there is no adapter."""
    try:
        names = sorted(name for name in os.listdir(path) if _belongs(name))
    except OSError:  # no folder, a name that is too long, a loop of links
        return ()
    if all(name in TEXT_FILES for name in names):
        return ()
    marks = []
    for name in names:
        try:
            status = os.stat(Path(path) / name)
        except OSError:  # going, or a link to nowhere
            marks.append((name, -1, 0, 0, 0))
            continue
        marks.append((name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(marks)
