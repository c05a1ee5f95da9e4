"""The CPU kernels of ``cpu.cpp`` and ``linear.cpp`` on torch tensors, float32 and bfloat16.

Step thread (or start-up). ``cpu_kernels`` answers None where the kernels cannot be had or do not
serve the dtype: callers then run torch's own operations. A result depends on its own row alone.

Legend: T tokens, D normed or head size, H query heads, K key/value heads, I and O features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from mstar_tp.kernels.build import load_library

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_SHARE = 16384
"""Elements that are worth a second thread: waking it costs about as much as reading them."""

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [_P, _N, _N, _P, _N, _P, _P, _N, _N, _F, _I],
    "rms_norm_wide": [_P, _N, _N, _P, _N, _P, _P, _N, _N, _F, _I],
    "silu_and_mul": [_P, _N, _P, _N, _N, _I],
    "gelu_tanh_and_mul": [_P, _N, _P, _N, _N, _I],
    "rotate": [_P, _N, _N, _P, _N, _N, _N, _P, _P, _N, _N, _I],
    "decode_attention": [
        *[_P, _N, _P, _P, _P, _P, _N, _P, _N, _N, _N, _N, _N, _N],
        *[_F, _F, _P, _N, _I],
    ],
    "lora_delta": [_P, _N, _P, _N, _N, _N, _P, _P, _I],
    "expert_linear": [_P, _N, _P, _P, _N, _N, _N, _P, _I],
    "pack_weight": [_P, _N, _N, _N, _P, _I],
    "linear": [_P, _N, _N, _P, _P, _N, _N, _P, _N, _P, _P, _I],
}


class Factors(ctypes.Structure):
    """The place of one linear's A and B in the slots; see ``Factors`` in grouped.h.

    It holds addresses only: whoever fills it keeps the tensors.
    """

    _fields_ = (
        *((name, _P) for name in ("a", "b")),
        *((name, _N) for name in ("a_slot", "b_slot")),
        *((name, _P) for name in ("ranks", "ends")),
        *((name, _N) for name in ("slices", "rank")),
    )


class RowsAt(ctypes.Structure):
    """The addresses of a step's adapter rows; see ``GroupedRows`` in grouped.h."""

    _fields_ = (
        *((name, _P) for name in ("order", "slots", "indptr")),
        ("groups", _N),
        ("scratch", _P),
    )

    @classmethod
    def of(
        cls, order: torch.Tensor, slots: torch.Tensor, indptr: torch.Tensor, scratch: torch.Tensor
    ) -> RowsAt:
        """Take the addresses of int64 tensors and float32 scratch, which the caller keeps."""
        places = (order.data_ptr(), slots.data_ptr(), indptr.data_ptr())
        return cls(*places, slots.shape[0], scratch.data_ptr())


@cache
def cpu_kernels(device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    """The kernels for tensors of ``dtype`` on ``device``, or None."""
    if device.type != "cpu" or dtype not in _SUFFIX:
        return None
    library = load_library()
    return None if library is None else CpuKernels(library, dtype)


class CpuKernels:
    """All kernels for one dtype. Last dimensions are contiguous; other strides are free."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._call: dict[str, Callable[..., None]] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"{name}_{_SUFFIX[dtype]}")
            function.argtypes, function.restype = arguments, None
            self._call[name] = function
        self._packed_size: Callable[[int, int], int] = getattr(
            library, f"packed_size_{_SUFFIX[dtype]}"
        )
        self._packed_size.argtypes = [_N, _N]
        self._packed_size.restype = _N

    @property
    def takes_long_runs(self) -> bool:
        """True where ``lora_delta`` keeps up with GEMMs for long runs of one slot."""
        return self._packed_size(1, 1) > 0

    def rms_norm(
        self,
        x: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        residual_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x / rms(x) * weight`` over the last dim of x [T, D] or [T, H, D]: a new tensor.

        With a ``residual`` [T, D], x is added to it in place first, and the sum is what is normed.
        A weight in x's dtype multiplies the rounded norm, one in float32 the norm itself.
        """
        dim = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        wide = weight_D.dtype is torch.float32 and x.dtype is not torch.float32
        self._call["rms_norm_wide" if wide else "rms_norm"](
            x.data_ptr(),
            x.stride(0),
            x.shape[1] if x.dim() == 3 else 1,
            None if residual_TD is None else residual_TD.data_ptr(),
            0 if residual_TD is None else residual_TD.stride(0),
            weight_D.data_ptr(),
            out.data_ptr(),
            x.numel() // dim,
            dim,
            eps,
            _threads(x.numel()),
        )
        return out

    def gated(self, kind: str, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """``act(gate) * up`` [T, I] of [T, 2I]; ``kind``: silu or gelu_tanh."""
        tokens, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
        out_TI = torch.empty((tokens, inner), dtype=gate_up_T2I.dtype)
        self._call[f"{kind}_and_mul"](
            gate_up_T2I.data_ptr(),
            gate_up_T2I.stride(0),
            out_TI.data_ptr(),
            tokens,
            inner,
            _threads(4 * out_TI.numel()),
        )
        return out_TI

    def rotate(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
    ) -> None:
        """Turn queries and keys in place; the first half of ``sin`` is negated."""
        tokens, heads, dim = q_THD.shape
        self._call["rotate"](
            q_THD.data_ptr(),
            q_THD.stride(0),
            heads,
            k_TKD.data_ptr(),
            k_TKD.stride(0),
            k_TKD.shape[1],
            dim,
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
            cos_T1D.stride(0),
            tokens,
            _threads(2 * q_THD.numel()),
        )

    def decode_attention(  # noqa: PLR0913 - a kernel call: each is one fact of the layer or step
        self,
        q_TX: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        tokens_B: torch.Tensor,
        pages_BW: torch.Tensor,
        lengths_B: torch.Tensor,
        *,
        num_heads: int,
        window: int | None,
        scale: float,
        softcap: float | None,
        out_TX: torch.Tensor,
    ) -> None:
        """Rows of one query each attend over their pages.

        Row b's query and output stand at ``tokens_B[b]`` of q and out [T, H*D]; its keys are the
        first ``lengths_B[b]`` (its own among them) of its pages; caches [pages, page_size, K, D].
        """
        _, page_size, kv_heads, dim = cache_k.shape
        rows, width = pages_BW.shape
        self._call["decode_attention"](
            q_TX.data_ptr(),
            q_TX.stride(0),
            tokens_B.data_ptr(),
            cache_k.data_ptr(),
            cache_v.data_ptr(),
            pages_BW.data_ptr(),
            width,
            lengths_B.data_ptr(),
            rows,
            num_heads,
            kv_heads,
            dim,
            page_size,
            window or 0,
            scale,
            softcap or 0.0,
            out_TX.data_ptr(),
            out_TX.stride(0),
            _threads(rows * width * page_size * num_heads * dim // 2),
        )

    def pack_weight(self, weight_OI: torch.Tensor) -> torch.Tensor | None:
        """The values as ``linear`` reads them, flat; None where this machine has no such GEMM."""
        outputs, inputs = weight_OI.shape
        size = self._packed_size(outputs, inputs)
        if not size:
            return None
        weight_OI = weight_OI if weight_OI.stride(1) == 1 else weight_OI.contiguous()
        packed = torch.empty(size, dtype=self.dtype)
        self._call["pack_weight"](
            weight_OI.data_ptr(),
            weight_OI.stride(0),
            outputs,
            inputs,
            packed.data_ptr(),
            torch.get_num_threads(),
        )
        return packed

    def linear(
        self,
        x_TI: torch.Tensor,
        packed: torch.Tensor,
        bias_O: torch.Tensor | None,
        outputs: int,
        factors: Factors | None = None,
        rows: RowsAt | None = None,
    ) -> torch.Tensor:
        """The product ``x @ weight.T + bias`` [T, O] of a packed weight.

        With factors and the step's adapter rows, ``B(A x)`` of those is added.
        """
        tokens, inputs = x_TI.shape
        y_TO = torch.empty((tokens, outputs), dtype=self.dtype)
        self._call["linear"](
            x_TI.data_ptr(),
            x_TI.stride(0),
            tokens,
            packed.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            inputs,
            outputs,
            y_TO.data_ptr(),
            outputs,
            None if factors is None else ctypes.addressof(factors),
            None if rows is None else ctypes.addressof(rows),
            _threads(4 * inputs * outputs),
        )
        return y_TO

    def lora_delta(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, factors: Factors, rows: RowsAt
    ) -> None:
        """``y += B(A x)`` of the step's adapter rows."""
        self._call["lora_delta"](
            y_TO.data_ptr(),
            y_TO.stride(0),
            x_TI.data_ptr(),
            x_TI.stride(0),
            x_TI.shape[1],
            y_TO.shape[1],
            ctypes.addressof(factors),
            ctypes.addressof(rows),
            torch.get_num_threads(),
        )

    def expert_linear(
        self, x_RI: torch.Tensor, weight_EOI: torch.Tensor, indptr: torch.Tensor
    ) -> torch.Tensor:
        """Each row times its expert's weight [R, O].

        Expert e's rows are ``indptr[e]`` to ``indptr[e + 1]``. ``weight`` is contiguous.
        """
        rows, (experts, outputs, inputs) = len(x_RI), weight_EOI.shape
        y_RO = torch.empty((rows, outputs), dtype=x_RI.dtype)
        self._call["expert_linear"](
            x_RI.data_ptr(),
            x_RI.stride(0),
            weight_EOI.data_ptr(),
            indptr.data_ptr(),
            experts,
            inputs,
            outputs,
            y_RO.data_ptr(),
            _threads(rows * outputs * inputs),
        )
        return y_RO


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _SHARE else 1
