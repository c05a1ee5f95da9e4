"""Opening files that must lie in given folders, whatever links lead to them.

A path that was checked may lead elsewhere by the time it is opened. So what counts is what was
opened: the kernel says where an open file really lies, and one outside the folders is closed
unread. Every file of an adapter is opened through here; which folders count is a matter of the
calling thread, since whoever parses files need not know. Imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

_ROOTS: ContextVar[tuple[str, ...] | None] = ContextVar("roots", default=None)

OUTSIDE = "leads outside the folders that adapters may be loaded from"


@contextlib.contextmanager
def confined(roots: Sequence[str] | None) -> Iterator[None]:
    """Files that this thread opens meanwhile must lie in ``roots``, real paths; None: anywhere."""
    token = _ROOTS.set(None if roots is None else tuple(roots))
    try:
        yield
    finally:
        _ROOTS.reset(token)


def open_file(path: str | Path) -> int:
    """A descriptor of a file, to be read. Of a FIFO too, without waiting for its writer.

    Raises:
        OSError: it cannot be opened, or does not lie where this thread may read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    roots = _ROOTS.get()
    if roots is not None and not any(lies_in(os.readlink(f"/proc/self/fd/{fd}"), r) for r in roots):
        os.close(fd)
        raise OSError(errno.EXDEV, OUTSIDE, os.fspath(path))
    return fd


def read_file(path: str | Path, most: int | None = None) -> bytes:
    """All that a file holds.

    Raises:
        OSError: as ``open_file``; it has more than ``most`` bytes.
    """
    with open(open_file(path), "rb") as file:
        data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise OSError(errno.EFBIG, f"is larger than {most} bytes", os.fspath(path))
    return data


def lies_in(real: str, root: str) -> bool:
    """True if a real path is that of a folder, or of something in it."""
    return real == root or real.startswith(root if root.endswith("/") else f"{root}/")
