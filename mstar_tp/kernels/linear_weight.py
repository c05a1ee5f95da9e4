"""One weight matrix and its GEMM, ``x @ weight.T + bias``, in the device's fastest layout.

On the CPU a weight can be packed once: for our own kernel, where the processor has the arithmetic
for it (``kernels/gemm.h``), else into oneDNN's blocked layout. Both read it at two to three times
the speed at which ``F.linear`` reads a plain weight; ours reads it at the memory's speed, and gives
a row the same bits whatever rows are beside it. oneDNN's packed ops are private to torch: where
they are absent or answer wrongly on a probe, the weight stays plain and ``F.linear`` runs it.

Step thread (or start-up) only. Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F

from mstar_tp.kernels.cpu import CpuKernels, cpu_kernels

_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACK_ROWS_HINT = 8  # oneDNN chooses a blocking for about this many rows: those of a decode step
_HALF_ROWS = 32  # from here a float16 weight is worth widening: see _half_linear

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LinearWeight:
    """A weight [O, I], plain until ``pack``. Calling it is the GEMM."""

    __slots__ = ("_gemm", "_weight", "dtype", "is_packed", "shape")

    def __init__(self, weight_OI: torch.Tensor) -> None:
        assert weight_OI.dim() == 2, f"wanted a weight [out, in], got {tuple(weight_OI.shape)}"
        self._weight = weight_OI
        self._gemm: Gemm = F.linear
        self.is_packed = False
        self.shape = (weight_OI.shape[0], weight_OI.shape[1])
        self.dtype = weight_OI.dtype

    def pack(self) -> None:
        """Lay the weight out for this device, drop the plain copy; a no-op where none is faster.

        Call it once, when the values are final. Afterwards the plain values are gone.
        """
        if self.is_packed:
            return
        own = _own_gemm(self._weight)
        if own is not None:
            self._weight, self._gemm = own
            self.is_packed = True
        elif _onednn_packs(self._weight):
            self._weight = _pack(self._weight)
            self._gemm = _packed_linear
            self.is_packed = True
        elif self.dtype is torch.float16 and self._weight.device.type == "cpu":
            self._gemm = _half_linear

    @property
    def packed(self) -> torch.Tensor | None:
        """The values as our own kernel reads them; None where another runs this weight."""
        return self._weight if self.is_packed and not self._weight.is_mkldnn else None

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """[T, I] -> [T, O], in the weight's dtype."""
        return self._gemm(x_TI, self._weight, bias_O)


def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether a packed CPU GEMM of this dtype exists here and answers right."""
    weight_OI = torch.ones(1, 1, dtype=dtype)
    return _own_gemm(weight_OI) is not None or _onednn_packs(weight_OI)


def _own_gemm(weight_OI: torch.Tensor) -> tuple[torch.Tensor, Gemm] | None:
    """The weight packed for our own kernel, and that."""
    kernels = cpu_kernels(weight_OI.device, weight_OI.dtype)
    packed = None if kernels is None else kernels.pack_weight(weight_OI)
    if kernels is None or packed is None:
        return None
    return packed, partial(_own_linear, kernels, weight_OI.shape[0])


def _own_linear(
    kernels: CpuKernels,
    outputs: int,
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    if x_TI.stride(-1) != 1:
        x_TI = x_TI.contiguous()
    return kernels.linear(x_TI, packed, bias_O, outputs)


def _onednn_packs(weight_OI: torch.Tensor) -> bool:
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.numel() > 0
        and weight_OI.dtype in _PACKED_DTYPES
        and _packed_gemm_works(weight_OI.dtype)
    )


def _pack(weight_OI: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight_OI.contiguous(), _PACK_ROWS_HINT
    )
    return packed


def _packed_linear(
    x_TI: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    out_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x_TI, packed, bias_O, "none", [], ""
    )
    return out_TO


def _half_linear(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """float16 on a CPU without float16 arithmetic, where torch's cost grows with every row.

    For many rows it pays to widen the weight for the call; keeping it wide would double its memory.
    """
    if x_TI.shape[0] < _HALF_ROWS:
        return F.linear(x_TI, weight_OI, bias_O)
    wide_bias_O = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), wide_bias_O).to(torch.float16)


@cache
def _packed_gemm_works(dtype: torch.dtype) -> bool:
    """Probe the private ops on a small product: they may be absent, or lack this dtype here."""
    x_TI = torch.arange(96, dtype=torch.float32).reshape(3, 32).remainder(7).to(dtype)
    weight_OI = torch.arange(512, dtype=torch.float32).reshape(16, 32).remainder(5).to(dtype)
    bias_O = torch.arange(16, dtype=torch.float32).to(dtype)
    try:
        got_TO = _packed_linear(x_TI, _pack(weight_OI), bias_O)
    except (AttributeError, RuntimeError, TypeError):
        return False
    wanted_TO = (x_TI.double() @ weight_OI.double().T + bias_O.double()).to(dtype)
    return torch.allclose(got_TO.double(), wanted_TO.double(), rtol=1e-2, atol=1e-2)
