"""Writing a recording without slowing the threads it records.

A put appends to a bounded list and returns; one thread looks every few milliseconds, encodes what
has come in and writes it. No put wakes that thread, which would take the interpreter from the step
that is being recorded, and no other thread waits for the disk. When the disk falls so far behind
that the list is full, entries are counted and their gap is written in their place; when it fails,
the recording ends with an error in the log. Nothing is lost in silence, and serving goes on.

File: eight magic bytes, then frames of a little-endian length, a CRC-32 and a MessagePack entry. A
process that is killed leaves all but its last few milliseconds: whole frames, and at most a torn
one at the end.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from mstar_tp.common.errors import ConfigError
from mstar_tp.recording.entries import End, Entry, Gap, Start, Timed

logger = logging.getLogger(__name__)

MAGIC = b"MSTPREC1"
FRAME = struct.Struct("<II")
"""Bytes of the payload, and their CRC-32."""

LIMIT = 1 << 16
"""Entries that may wait for the disk."""
BATCH = 16
"""Entries in one write: encoding holds the interpreter, a write lets go of it."""
LOOK_EVERY_S = 0.01


class Recorder:
    """Takes entries and drops them: what a rank has when nothing is recorded."""

    def put(self, entry: Entry) -> None:
        """Record ``entry``. Any thread; never blocks."""


NO_RECORDING = Recorder()


def recording_path(base: str, rank: int, epoch: int) -> Path:
    """Return the path of ``rank``'s recording when ``--record`` is ``base``.

    A restarted group writes anew.
    """
    restarted = f".epoch{epoch}" if epoch else ""
    return Path(f"{base}{restarted}.rank{rank}")


def encode(timed: Timed, encoder: msgspec.msgpack.Encoder) -> bytes:
    """One frame of the file."""
    payload = encoder.encode(timed)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class FileRecorder(Recorder):
    """Writes one file. Entries put before ``start`` wait for it; ``close`` writes what is left."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        """Create the file.

        Raises:
            ConfigError: it exists, or cannot be created.
        """
        self.path = path
        self._limit = limit
        try:
            # Unbuffered: each write reaches the kernel, which a killed process leaves behind.
            self._file: BinaryIO = path.open("xb", buffering=0)
        except FileExistsError:
            raise ConfigError(
                f"--record: {path} exists already: remove it or name another file"
            ) from None
        except OSError as error:
            raise ConfigError(f"--record: {path} cannot be created: {error.strerror}") from None
        self._lock = threading.Lock()  # guards _lost and _waiting; a leaf
        self._lost = 0
        self._waiting: list[Timed] = []
        self._passed = threading.Condition()  # guards _passes; a leaf
        self._passes = 0
        """How often the writer has written all that had come in."""
        self._closing = threading.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._start: Start | None = None
        self._closed = False

    def start(self, start: Start) -> None:
        """Write the first entry and begin to write the rest."""
        self._start = start
        self._thread.start()

    def put(self, entry: Entry) -> None:
        timed = Timed(time.monotonic_ns(), entry)
        with self._lock:
            if self._lost or len(self._waiting) >= self._limit:
                self._lost += 1
            else:
                self._waiting.append(timed)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put is written; False when the disk takes longer than that."""
        if self._start is None:
            return False
        with self._passed:
            # The pass that is under way may have begun before the last put.
            wanted = self._passes + 2
            return self._passed.wait_for(lambda: self._passes >= wanted, timeout_s)

    def close(self) -> None:
        """Write what was put and end the file. Blocks on the disk; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        if self._start is not None:
            self._thread.join()
        self._file.close()

    # ------------------------------------------------------------------ writer's thread

    def _write_all(self) -> None:
        assert self._start is not None
        going = self._write(MAGIC + self._frame(self._start))
        closing = False
        while not closing:
            closing = self._closing.wait(LOOK_EVERY_S)
            batch, lost = self._take()
            for first in range(0, len(batch), BATCH):
                data = b"".join(encode(t, self._encoder) for t in batch[first : first + BATCH])
                going = going and self._write(data)
            if lost:
                logger.warning("%s lacks %d entries: its disk is slow", self.path, lost)
                going = going and self._write(self._frame(Gap(lost=lost)))
            with self._passed:
                self._passes += 1
                self._passed.notify_all()
        if going:
            self._write(self._frame(End()))

    def _take(self) -> tuple[list[Timed], int]:
        """Return what has come in, and how many entries found no place behind it."""
        with self._lock:
            batch, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
        return batch, lost

    def _frame(self, entry: Entry) -> bytes:
        return encode(Timed(time.monotonic_ns(), entry), self._encoder)

    def _write(self, data: bytes) -> bool:
        """Return whether all of ``data`` was written; if not, the recording has ended."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            logger.error("%s ends here, serving goes on: %s", self.path, error.strerror)
            return False
        return True
