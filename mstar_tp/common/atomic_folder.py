"""A folder of results that comes to be whole or not at all.

It is written under a hidden name beside its place and renamed when it is whole. A failure or an
interrupt removes it; what a killed process left is removed by the next that writes there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mstar_tp.common.errors import OutputError
from mstar_tp.common.units import in_bytes

_SPARE_BYTES = 1 << 20
_BUSY = ".unfinished."


class FreshFolder:
    """``with FreshFolder(path, ...) as folder``: write into ``folder``; at the end it is ``path``.

    ``inputs`` are paths that the result is made from, which it may not replace. With ``force`` a
    folder in its place is replaced if it holds ``kind_file``, so that no other folder is deleted.

    Raises:
        OutputError: at construction or entry, the place cannot be used; in the body, a write fails.
    """

    def __init__(
        self, path: str | Path, *, inputs: Sequence[Path], kind_file: str, force: bool
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._prefix = f".{self.path.name}{_BUSY}"
        self._lock = -1
        self._inputs, self._kind_file, self._force = inputs, kind_file, force
        self._check(inputs, kind_file, force)

    def check_space(self, num_bytes: int) -> None:
        """There is room for as many bytes.

        Raises:
            OutputError: there is not; both numbers are named.
        """
        free = shutil.disk_usage(self.path.parent).free
        if free < num_bytes + _SPARE_BYTES:
            raise OutputError(
                f"{self.path.parent}: has {in_bytes(free)} free, and the result takes "
                f"{in_bytes(num_bytes)}: make room or choose another --out"
            )

    def __enter__(self) -> Path:
        try:
            self._remove_leftovers()
            while not self._begin():
                pass  # another process saw a leftover in it: that one is past its search now
        except OSError as error:
            raise self._failed(error) from None
        return self._folder

    def _begin(self) -> bool:
        """Make the folder and lock it; False when it was removed before it was locked."""
        self._folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self.path.parent))
        try:
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        # Held while this process lives: who can take it has found a folder that nobody writes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not self._folder.exists():
            os.close(lock)
            return False
        self._lock = lock
        return True

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._land()
        except OSError as error:
            raise self._failed(error) from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        if isinstance(exc, OSError):
            raise self._failed(exc) from None

    def _check(self, inputs: Sequence[Path], kind_file: str, force: bool) -> None:
        for given in inputs:
            real = Path(os.path.realpath(given))
            if self.path == real or self.path in real.parents:
                raise OutputError(f"{self.path}: holds the input {given}: choose another --out")
        if not self.path.parent.is_dir():
            raise OutputError(f"{self.path.parent}: no such folder: create it, or correct --out")
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OutputError(f"{self.path}: is a file: choose another --out")
        if self.path.is_mount():
            raise OutputError(f"{self.path}: is a mount point: choose a folder inside it")
        if not any(self.path.iterdir()):
            return
        if not force:
            raise OutputError(f"{self.path}: is not empty: choose another --out, or add --force")
        if not (self.path / kind_file).is_file():
            raise OutputError(
                f"{self.path}: has no {kind_file}, so --force does not replace it: choose another "
                "--out, or remove the folder yourself"
            )

    def _land(self) -> None:
        os.chmod(self._folder, 0o777 & ~_umask())
        for name in os.listdir(self._folder):
            _sync(self._folder / name)
        _sync(self._folder)
        # What stands there now may have come while this was written.
        self._check(self._inputs, self._kind_file, self._force)
        if not self._force or not self.path.exists():
            self._take_place()
        else:
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old.", dir=self.path.parent))
            os.rename(self.path, old)
            try:
                self._take_place()
            except BaseException:
                os.rename(old, self.path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        _sync(self.path.parent)

    def _take_place(self) -> None:
        try:
            os.rename(self._folder, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise OutputError(
                f"{self.path}: was made by another process meanwhile: choose another --out"
            ) from None

    def _remove_leftovers(self) -> None:
        for entry in self.path.parent.iterdir():
            if entry.name.startswith(self._prefix) and entry.is_dir() and not entry.is_symlink():
                try:
                    fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue  # its process has just put it in its place
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry, ignore_errors=True)
                except BlockingIOError:
                    continue  # another process writes the same result now
                finally:
                    os.close(fd)

    def _failed(self, error: OSError) -> OutputError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else (error.strerror or str(error))
        where = error.filename or self.path
        remedy = ": make room or choose another --out" if full else ""
        return OutputError(f"{where}: {what}{remedy}; nothing was written to {self.path}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
