"""Tensor-core products that Triton's interpreter gets right too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_add(left, right, total, WIDEN: tl.constexpr):
    """``total + left @ right`` in float32, of float32 operands without loss.

    The interpreter multiplies the bit patterns of bfloat16 operands, so there they are widened
    first (``WIDEN``): products of two bfloat16 are exact in float32, so that changes no result.
    """
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="tf32x3")


def widens() -> bool:
    """Tell whether the interpreter runs the kernels."""
    return bool(triton.knobs.runtime.interpret)
