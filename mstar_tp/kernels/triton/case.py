"""One launch of one kernel, as it is compiled ahead of time."""

from __future__ import annotations

from typing import Any, NamedTuple

DTYPES = {"float16": ("fp16", 2), "bfloat16": ("bf16", 2), "float32": ("fp32", 4)}
"""Name -> Triton's name and bytes."""


class Case(NamedTuple):
    """One launch of one kernel. ``types``: of its tensors; its other arguments are int32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    odd: frozenset[str] = frozenset({"max_rank"})
    """Numbers that need not be multiples of 16, as pointers and strides are for models' shapes."""
