"""Which layout a GEMM over adapter slots runs in: measured on a CPU, plain elsewhere."""

from __future__ import annotations

import torch

from mstar_tp.layers.gemm import LinearWeight
from mstar_tp.lora.slot_weights import Gemm

PACK_BYTES = 1 << 16
"""Packed weights read faster, but a call of the packed op costs more: below this the plain one wins."""


def laid_out(weight_OI: torch.Tensor) -> Gemm | None:
    """The packed GEMM of a weight that will not change, or None where the plain one is as fast."""
    if weight_OI.nbytes < PACK_BYTES:
        return None
    weight = LinearWeight(weight_OI)
    weight.pack()
    return weight if weight.is_packed else None
