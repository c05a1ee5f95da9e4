"""A running hash over a table's history, compared between ranks (R8).

Two ranks that made the same changes in the same order hold the same value; nothing of the table
itself is hashed again,
so a check costs the same however large the table is.
"""

from __future__ import annotations

import hashlib
import struct


class HistoryHash:
    """Owned by whoever owns the table it follows; no lock of its own."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._value: int | None = None

    def add(self, *values: int) -> None:
        """Record one change as int64 numbers."""
        self._hash.update(struct.pack(f"<{len(values)}q", *values))
        self._value = None

    def add_text(self, text: str) -> None:
        """Record a name (length first, so two names never run together)."""
        data = text.encode()
        self._hash.update(struct.pack("<q", len(data)) + data)
        self._value = None

    def value(self) -> int:
        """The hash so far, as a non-negative 63-bit number."""
        if self._value is None:
            self._value = int.from_bytes(self._hash.digest(), "little") >> 1
        return self._value
