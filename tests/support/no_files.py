"""Things that stand in the place of a file and are none, for tests of whoever opens files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def as_nothing(path: Path) -> None:
    path.unlink(missing_ok=True)


def as_folder(path: Path) -> None:
    as_nothing(path)
    path.mkdir()


def as_fifo(path: Path) -> None:
    as_nothing(path)
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    as_nothing(path)
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)
        try:  # a socket's path is bounded to some hundred bytes
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def as_device(path: Path) -> None:
    as_nothing(path)
    path.symlink_to("/dev/zero")


def as_loop(path: Path) -> None:
    as_nothing(path)
    path.symlink_to(path.name)


def as_dangling(path: Path) -> None:
    as_nothing(path)
    path.symlink_to("nowhere")


def as_self(path: Path) -> None:
    """A link to the folder."""
    as_nothing(path)
    path.symlink_to(".")


NO_FILES: tuple[Callable[[Path], None], ...] = (
    as_nothing,
    as_folder,
    as_fifo,
    as_socket,
    as_device,
    as_loop,
    as_dangling,
    as_self,
)
"""Each puts something else where a path leads."""
