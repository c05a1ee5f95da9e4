"""The decode step of ``decode.cpp``: its structs and functions, for float32 and bfloat16.

Step thread (or start-up). The structs hold addresses only: whoever fills them keeps the tensors.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from mstar_tp.kernels.build import load_library
from mstar_tp.kernels.cpu import Factors

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class Linear(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("weight", "bias")),
        *((name, _N) for name in ("inputs", "outputs")),
        ("factors", Factors),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "angles")),
        *((name, _P) for name in ("keys", "values")),
        ("window", _N),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        *((name, _N) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim", "inner")),
        ("page_size", _N),
        *((name, _F) for name in ("eps", "scale", "softcap")),
        *((name, _I) for name in ("gelu", "threads", "dtype")),
        ("embedding", _P),
        *((name, _N) for name in ("vocab_first", "vocab_rows")),
        ("norm", _P),
        ("head", Linear),
        ("comm", _P),
        *((name, _P) for name in ("residual", "x", "wide", "mixed", "local")),
    )


class DecodeStep(ctypes.Structure):
    _fields_ = (
        ("rows", _N),
        *((name, _P) for name in ("ids", "positions", "places", "pages", "lengths")),
        ("width", _N),
        *((name, _P) for name in ("adapters", "logits")),
    )


@cache
def decode_step(dtype: torch.dtype) -> Callable[[int, int], int] | None:
    """The C++ ``decode_step`` of ``dtype``, for the addresses of a Decoder and a DecodeStep.

    None where CPU kernels cannot be had or do not serve it.
    """
    library = load_library() if dtype in _SUFFIX else None
    if library is None:
        return None
    function: Callable[[int, int], int] = getattr(library, f"decode_step_{_SUFFIX[dtype]}")
    function.argtypes, function.restype = [_P, _P], ctypes.c_int  # type: ignore[attr-defined]
    return function


@cache
def _best_of_rows() -> Callable[..., None] | None:
    library = load_library()
    if library is None:
        return None
    function: Callable[..., None] = library.best_of_rows
    function.argtypes = [_P, _N, _N, _N, _P, _P]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


def best_of_rows(x_RV: torch.Tensor) -> tuple[list[int], list[bool]] | None:
    """The first place of each row's largest value, and whether that is a finite number.

    It is not where any value is NaN. None where there is no kernel for ``x``.
    """
    if x_RV.device.type != "cpu" or x_RV.dtype is not torch.float32 or x_RV.stride(1) != 1:
        return None
    function = _best_of_rows()
    if function is None:
        return None
    rows, size = x_RV.shape
    best, finite = (ctypes.c_int64 * rows)(), (ctypes.c_uint8 * rows)()
    function(x_RV.data_ptr(), x_RV.stride(0), rows, size, best, finite)
    return best[:], [value != 0 for value in finite]
