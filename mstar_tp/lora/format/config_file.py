"""Small files beside an adapter's weights, read whole and within bounds. No torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from mstar_tp.common.confined_files import open_file
from mstar_tp.common.errors import AdapterError
from mstar_tp.common.strict_json import JsonError, parse_json
from mstar_tp.common.strict_json import show as _shown

MAX_CONFIG_BYTES = 4 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small regular file.

    Raises:
        FileNotFoundError: there is no such file.
        AdapterError: it is no regular file, larger than ``MAX_CONFIG_BYTES``, or no JSON object.
    """
    # Windows' editors put a byte order mark before it.
    data = read_small(path).removeprefix(b"\xef\xbb\xbf")
    try:
        tree = parse_json(data)
    except JsonError as cause:
        raise AdapterError(f"{path}: {cause}: write it again") from None
    if not isinstance(tree, dict):
        raise AdapterError(f"{path}: holds {_shown(tree)}, wanted a JSON object of settings")
    return tree


def read_small(path: Path) -> bytes:
    """All that is in a small regular file.

    Raises:
        FileNotFoundError: there is no such file.
        AdapterError: it is no regular file, or larger than ``MAX_CONFIG_BYTES``.
    """
    try:
        fd = open_file(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise AdapterError(f"{path}: is not a regular file: put the file itself there")
            data = _read_up_to(fd, MAX_CONFIG_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError(
            f"{path}: is larger than {MAX_CONFIG_BYTES} bytes, the most such a file may be"
        )
    return data


def _read_up_to(fd: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
