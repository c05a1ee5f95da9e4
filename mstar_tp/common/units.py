"""Amounts as a person reads them."""

from __future__ import annotations


def in_bytes(number: int) -> str:
    """A number of bytes, in the largest unit of which there is one."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def counted(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
