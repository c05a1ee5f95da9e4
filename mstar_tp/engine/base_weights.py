"""The base model's weights as its checkpoint holds them, for comparing copies in adapter files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from mstar_tp.models.checkpoint import Checkpoint


class CheckpointWeights:
    """Opens the model's files at the first question and keeps them open. Any thread."""

    def __init__(self, folder: str | Path, canonical: Callable[[str], str] = str) -> None:
        """``canonical``: a stored key in the model's own spelling."""
        self._folder = folder
        self._canonical = canonical
        self._lock = threading.Lock()  # guards _checkpoint
        self._checkpoint: Checkpoint | None = None

    def read_rows(self, name: str, rows: range) -> torch.Tensor | None:
        """Rows of the tensor called ``name``, in the checkpoint's dtype; None where it has none.

        Blocks on the disk.

        Raises:
            CheckpointError: the model's files are no longer readable.
        """
        with self._lock:
            if self._checkpoint is None:
                self._checkpoint = Checkpoint(self._folder, self._canonical)
            checkpoint = self._checkpoint
        if not checkpoint.has(name):
            return None
        info = checkpoint.info(name)
        out = torch.empty((len(rows), *info.shape[1:]), dtype=info.torch_dtype)
        checkpoint.read_rows(name, info.shape, rows, out)
        return out
