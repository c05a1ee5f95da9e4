"""Memory of CPU copies and of what they are read through, zeroed.

Giving a hundred megabytes back to the system takes up to tens of milliseconds. ``free`` would hold
the interpreter for as long, in whichever thread drops the last reference, and every step would wait
for it. So large blocks are mapped and unmapped by calls that let the interpreter go, in huge pages
where the system has them: those cost a tenth to clear and to give back.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import numpy as np
import torch

MAPPED_BYTES = 1 << 20
"""Blocks from this size on are mapped one by one; a process may have some 65,000 mappings."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HUGEPAGE = mmap.MADV_HUGEPAGE
_FAILED = ctypes.c_void_p(-1).value


def zeros(shape: tuple[int, ...], dtype: torch.dtype, page_locked: bool = False) -> torch.Tensor:
    """Zeros on the CPU; unless page-locked, pages that the system zeroes at their first write."""
    size = math.prod(shape) * dtype.itemsize
    if page_locked or not size:
        return torch.zeros(shape, dtype=dtype, pin_memory=page_locked)
    data = _mapped(size) if size >= MAPPED_BYTES else None
    if data is None:
        data = torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return data.view(dtype).view(shape)


def _mapped(size: int) -> torch.Tensor | None:
    """None where the system has no mapping to give."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _FAILED:
        return None
    _libc.madvise(address, size, _HUGEPAGE)
    block = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(block, _libc.munmap, address, size).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)
