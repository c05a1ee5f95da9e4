"""Checking many adapters: headers only, side by side, and a like one is recognised. No torch.

Fleets of adapters are made by one recipe: same settings, same header, other weights. A check reads
no weights, so what it found for one holds for all that are like it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from mstar_tp.common.confined_files import open_file
from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.adapter_files import WEIGHTS_NAME, FileIdentity
from mstar_tp.lora.format.checkpoint import AdapterFile, check_adapter_file
from mstar_tp.lora.format.peft_config import CONFIG_NAME
from mstar_tp.lora.spec import LoraSpec

Kept = TypeVar("Kept")

KNOWN_RECIPES = 16
CHECK_THREADS = 8
_MAX_START_BYTES = 4 << 20
"""A longer header or config is checked in full each time."""


class _Likeness(NamedTuple):
    """All that a check of a folder reads, in short; and which file it was."""

    recipe: bytes
    identity: FileIdentity


class AdapterChecker:
    """Checks adapters for one spec of a model's, and remembers the last recipes that passed.

    Any thread; the lock guards the recipes and is never held over I/O.
    """

    def __init__(
        self,
        spec: LoraSpec,
        others: Sequence[LoraSpec] = (),
        full: Callable[[str, Path], AdapterFile] | None = None,
    ) -> None:
        """``full``: another way to validate what is new, which reads no more than this one does."""
        self._full = full or (lambda name, folder: check_adapter_file(spec, name, folder, others))
        self._lock = threading.Lock()
        self._recipes: OrderedDict[bytes, AdapterFile] = OrderedDict()

    def check(self, name: str, path: str | Path) -> AdapterFile:
        """Fit of one adapter folder, from its config and header. Blocks on the disk.

        Raises:
            AdapterError: it cannot be served exactly, or not be read; adapter and file are named.
        """
        folder = Path(path)
        try:
            like = _likeness(folder) if folder.is_dir() else None
            known = None if like is None else self._known(like.recipe)
            if like is not None and known is not None:
                (part,) = known.files
                mine = replace(part, path=folder / WEIGHTS_NAME, identity=like.identity)
                return replace(known, adapter=name, files=(mine,))
            file = self._full(name, folder)
        except OSError as error:
            where = error.filename or path
            raise AdapterError(f"adapter {name!r}: {where}: {error.strerror or error}") from None
        # Both looks at the folder must have seen one file.
        if like is not None and (like.identity,) == file.identity:
            self._remember(like.recipe, file)
        return file

    def _known(self, recipe: bytes) -> AdapterFile | None:
        with self._lock:
            known = self._recipes.get(recipe)
            if known is not None:
                self._recipes.move_to_end(recipe)
            return known

    def _remember(self, recipe: bytes, file: AdapterFile) -> None:
        with self._lock:
            self._recipes[recipe] = file
            if len(self._recipes) > KNOWN_RECIPES:
                self._recipes.popitem(last=False)


def check_all(
    adapters: Sequence[tuple[str, str]],
    check: Callable[[str, str], Kept],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Kept]:
    """``check(name, folder)`` of each, side by side; what it keeps of each, in order.

    ``progress(done, total)`` is called after each. Only what ``check`` returns is kept, so the
    headers of thousands never lie in memory at once.

    Raises:
        AdapterError: naming every adapter that cannot be served, one a line.
    """

    def validate(adapter: tuple[str, str]) -> Kept | AdapterError:
        try:
            return check(*adapter)
        except AdapterError as error:
            return error

    kept: list[Kept] = []
    causes: list[str] = []
    with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="lora-check") as threads:
        for done, result in enumerate(threads.map(validate, adapters), start=1):
            if isinstance(result, AdapterError):
                causes.append(str(result))
            else:
                kept.append(result)
            progress(done, len(adapters))
    if causes:
        raise AdapterError("\n".join(causes))
    return kept


def _likeness(folder: Path) -> _Likeness | None:
    """None for a folder that only a full check can validate."""
    names = sorted(os.listdir(folder))
    if CONFIG_NAME not in names or WEIGHTS_NAME not in names:
        return None
    config = _start(folder / CONFIG_NAME, lambda size, head: size)
    weights = _start(
        folder / WEIGHTS_NAME, lambda size, head: 8 + int.from_bytes(head[:8], "little")
    )
    if config is None or weights is None:
        return None
    recipe = hashlib.sha256()
    for part in (
        os.fsencode("\n".join(names)),
        config[0],
        weights[0],
        str(weights[1].size).encode(),
    ):
        recipe.update(len(part).to_bytes(8, "little") + part)
    return _Likeness(recipe.digest(), weights[1])


def _start(path: Path, length_of: Callable[[int, bytes], int]) -> tuple[bytes, FileIdentity] | None:
    """The first ``length_of(size, first bytes)`` bytes of a regular file.

    None where it has not as many, or they are too many to be worth it.
    """
    try:
        fd = open_file(path)
    except OSError:
        return None  # the full check says so
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        length = length_of(status.st_size, os.pread(fd, 8, 0))
        if length > min(status.st_size, _MAX_START_BYTES):
            return None
        data = os.pread(fd, length, 0)
    finally:
        os.close(fd)
    identity = FileIdentity(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return (data, identity) if len(data) == length else None
