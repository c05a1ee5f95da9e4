"""Which layout a GEMM over adapter slots runs in: measured on a CPU, plain elsewhere."""

from __future__ import annotations

import torch

from mstar_tp.layers.gemm import LinearWeight
from mstar_tp.lora.slot_weights import Gemm

_PACK_BYTES = {torch.float32: 1 << 20}
_PACK_BYTES_ELSE = 1 << 14
"""Packed weights read faster, but in float32 a call of the packed op costs more: below this plain
wins.
"""


def laid_out(weight_OI: torch.Tensor) -> Gemm | None:
    """The packed GEMM of a weight that will not change, or None where the plain one is as fast."""
    if weight_OI.nbytes < _PACK_BYTES.get(weight_OI.dtype, _PACK_BYTES_ELSE):
        return None
    weight = LinearWeight(weight_OI)
    weight.pack()
    return weight if weight.is_packed else None
