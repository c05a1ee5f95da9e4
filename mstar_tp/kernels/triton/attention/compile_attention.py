"""The attention kernels' launches, for compilation ahead of time.

They are over head sizes, with and without window and cap.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstar_tp.kernels.triton.attention.decode import attend_decode_kernel, combine_decode_kernel
from mstar_tp.kernels.triton.attention.kv_write import kv_write_kernel
from mstar_tp.kernels.triton.attention.prefill import attend_prefill_kernel
from mstar_tp.kernels.triton.attention.sizes import (
    LEAST_SPLIT_KEYS,
    MAX_SPLITS,
    WRITE_COLUMNS,
    AttendSizes,
    decode_sizes,
    prefill_sizes,
)
from mstar_tp.kernels.triton.case import DTYPES, Case

GROUP = 8
PAGE_SIZE = 16
SHAPES = ((64, False), (80, False), (128, False), (128, True), (256, False), (256, True))
"""Head size, and whether window and cap are there."""
_ODD = frozenset({"scale", "softcap", "window", "num_splits", "stride_row", "stride_page"})
_TABLES = {name: "*i32" for name in ("pages", "lengths", "starts", "tiles", "slots")}
_SCALARS = {"scale": "fp32", "softcap": "fp32"}


def attention_cases(dtype: str) -> Iterator[Case]:
    """Every launch whose code differs, for keys of ``dtype``."""
    element, size = DTYPES[dtype]
    elements = {name: f"*{element}" for name in ("out", "q", "k", "v", "cache_k", "cache_v")}
    types = elements | _TABLES | _SCALARS | {"sums": "*fp32", "weights": "*fp32"}
    for dim, bent in SHAPES:
        name = f"head {dim}{', window, cap' if bent else ''}"
        decode, prefill = (choose(GROUP, dim, size) for choose in (decode_sizes, prefill_sizes))
        kind = {"WINDOW": bent, "SOFTCAP": bent}
        yield Case(
            f"attend decode {name}",
            attend_decode_kernel,
            types,
            {
                **_layer(dim, decode),
                **kind,
                "HEADS": 4 * GROUP,
                "LEAST_KEYS": LEAST_SPLIT_KEYS,
                "BLOCK_G": decode.block_heads,
            },
            decode.num_warps,
            decode.num_stages,
            _ODD,
        )
        yield Case(
            f"attend prefill {name}",
            attend_prefill_kernel,
            types,
            {
                **_layer(dim, prefill),
                **kind,
                "BLOCK_M": prefill.block_rows,
                "BLOCK_G": prefill.block_heads,
            },
            prefill.num_warps,
            prefill.num_stages,
            _ODD,
        )
    sizes = decode_sizes(GROUP, 256, size)
    yield Case(
        "attend combine head 256",
        combine_decode_kernel,
        types,
        {
            "HEADS": 4 * GROUP,
            "HEAD_DIM": 256,
            "WINDOW": True,
            "LEAST_KEYS": LEAST_SPLIT_KEYS,
            "BLOCK_N": sizes.block_keys,
            "BLOCK_S": MAX_SPLITS,
            "BLOCK_D": sizes.block_dim,
        },
        1,
        1,
        _ODD,
    )
    width = {"WIDTH": 4 * 128, "BLOCK": min(WRITE_COLUMNS, 4 * 128)}
    yield Case("kv_write", kv_write_kernel, types, dict(width), 4, 1, _ODD)


def _layer(dim: int, sizes: AttendSizes) -> dict[str, object]:
    return {
        "GROUP": GROUP,
        "HEAD_BLOCKS": 1,
        "HEAD_DIM": dim,
        "PAGE_SIZE": PAGE_SIZE,
        "BLOCK_N": sizes.block_keys,
        "BLOCK_D": sizes.block_dim,
        "WIDEN": False,
    }
