"""Folders that belong to one running process, and that the next start removes should it be killed.

A folder's owner holds a lock on a file in it for as long as it lives; the kernel lets go of the
lock however the process ends. So whoever can take the lock may remove the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "mstar-run-"
_UNBORN = ".mstar-new-"
"""The prefix of a folder whose owner has not locked it yet."""
UNBORN_FOR_S = 3600.0
LOCK = "owner"


class RunFolder:
    """A fresh folder that only this user may enter; it goes at ``close``."""

    def __init__(self, parent: str | Path | None = None) -> None:
        """Make the folder in ``parent``, or where temporary files go.

        Raises:
            OSError: no folder can be made there.
        """
        base = Path(tempfile.gettempdir() if parent is None else parent)
        unborn = Path(tempfile.mkdtemp(prefix=_UNBORN, dir=base))
        self._lock = os.open(unborn / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Named only once it is locked: nobody who sweeps can take it for an orphan before.
        self.path = unborn.with_name(PREFIX + unborn.name.removeprefix(_UNBORN))
        unborn.rename(self.path)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: str | Path | None = None) -> list[Path]:
    """Remove the folders in ``parent`` whose owners are gone; which those were.

    Leaves alone what is another user's, and what a live process holds.
    """
    base = Path(tempfile.gettempdir() if parent is None else parent)
    swept = []
    for path in (*base.glob(f"{PREFIX}*"), *base.glob(f"{_UNBORN}*")):
        if _is_orphan(path):
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a killed process left behind", path)
            swept.append(path)
    return swept


def _is_orphan(path: Path) -> bool:
    try:
        found = path.lstat()
        if found.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
            return False
        if path.name.startswith(_UNBORN) and time.time() - found.st_mtime < UNBORN_FOR_S:
            return False
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
