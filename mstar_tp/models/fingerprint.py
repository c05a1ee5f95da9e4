"""The fingerprint of a base model's weights, taken without reading them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from mstar_tp.common.errors import CheckpointError


def model_fingerprint(folder: str | Path, dtype: str) -> str:
    """A hash of the model's settings, its weight files, and the type that it is served in.

    Of the files, names, sizes and headers count. It is equal wherever equal files lie. Blocks on
    the disk.

    Raises:
        CheckpointError: a file cannot be read.
    """
    hashed = hashlib.blake2b(dtype.encode(), digest_size=16)
    folder = Path(folder)
    try:
        hashed.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = file.read(8)
                # A damaged length reads at most what a header may have; loading has refused it.
                header = file.read(min(struct.unpack("<Q", size)[0], 100 << 20))
            hashed.update(f"{path.name} {path.stat().st_size} ".encode() + header)
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from None
    return hashed.hexdigest()
