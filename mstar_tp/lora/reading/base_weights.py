"""Comparing copies of base weights in an adapter file with the base model's own.

PEFT writes the base weight of an adapted embedding or head beside its factors. Equal to the
model's, the copy is without effect; different, the adapter was trained on another model. Reader
threads.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.parts import BaseCopy
from mstar_tp.tensor_files.reader import TensorFile

_COMPARE_ELEMENTS = 1 << 18
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BaseWeights(Protocol):
    """The base model's checkpoint. Any thread."""

    def read_rows(self, name: str, rows: range) -> torch.Tensor | None:
        """Rows of the tensor called ``name``, in the checkpoint's dtype; None where it has none.

        Blocks on the disk.
        """
        ...


def check_copy(
    copy: BaseCopy, file: TensorFile, base: BaseWeights | None, rank: int, world_size: int
) -> None:
    """Compare this rank's share of the rows: an agreement over the ranks covers all of them.

    Raises:
        AdapterError: the copy differs from the base model's weight, or that cannot be read.
    """
    key, info = copy.tensor.key, copy.tensor.info
    num_rows = info.shape[0]
    share = range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)
    step = max(1, _COMPARE_ELEMENTS // max(1, info.shape[-1]))
    for first in range(0, len(share), step):
        rows = share[first : first + step]
        mine = None if base is None else base.read_rows(copy.name, rows)
        if mine is None:
            raise AdapterError(
                f"{file.path}: {key}: is a copy of a base weight, and the base model holds no "
                f"{copy.name} to compare it with: remove it from the file"
            )
        if not _equal(file.read_rows(key, rows), mine):
            raise AdapterError(
                f"{file.path}: {key}: differs from the base model's {copy.name} in rows "
                f"{rows.start} to {rows.stop - 1}: the adapter was trained on another base model; "
                "serve it on that one"
            )


def _equal(theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Tell whether a cast makes ``mine`` into ``theirs``.

    The model may have been trained in another dtype than it is kept in.
    """
    if theirs.shape != mine.shape:
        return False
    casts = (mine.to(dtype).to(theirs.dtype) for dtype in (mine.dtype, *_DTYPES))
    return any(torch.equal(cast, theirs) for cast in casts)
