"""Gated activations of the feed-forward block: ``act(gate) * up`` of a merged [T, 2I] projection.

Legend: T tokens, I this rank's intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar_tp.kernels.cpu import cpu_kernels


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """[T, 2I] (gate, then up) -> [T, I]."""
    kernels = cpu_kernels(gate_up_T2I.device, gate_up_T2I.dtype)
    if kernels is not None:
        return kernels.gated("silu", gate_up_T2I)
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI).mul_(up_TI)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """[T, 2I] (gate, then up) -> [T, I], with the tanh approximation of GELU."""
    kernels = cpu_kernels(gate_up_T2I.device, gate_up_T2I.dtype)
    if kernels is not None:
        return kernels.gated("gelu_tanh", gate_up_T2I)
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.gelu(gate_TI, approximate="tanh").mul_(up_TI)
