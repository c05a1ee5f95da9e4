"""Writing a recording without slowing the threads it records.

A put appends to a bounded queue and returns; one thread encodes and writes what has come in, so no
other waits for the disk. When the disk falls so far behind that the queue is full, entries are
counted and their gap is written in their place; when it fails, the recording ends with an error in
the log. Nothing is lost in silence, and serving goes on.

File: eight magic bytes, then frames of a little-endian length, a CRC-32 and a MessagePack entry. A
process that is killed leaves whole frames and at most one torn one at the end.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import zlib
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

import msgspec

from mstar_tp.errors import ConfigError
from mstar_tp.record.entries import End, Entry, Gap, Start, Timed

logger = logging.getLogger(__name__)

MAGIC = b"MSTPREC1"
FRAME = struct.Struct("<II")
"""Bytes of the payload, and their CRC-32."""

LIMIT = 1 << 16
"""Entries that may wait for the disk."""
BATCH = 1024
"""Entries in one write."""


class Recorder:
    """Takes entries and drops them: what a rank has when nothing is recorded."""

    def put(self, entry: Entry) -> None:
        """Record ``entry``. Any thread; never blocks."""


NO_RECORDING = Recorder()


def recording_path(base: str, rank: int, epoch: int) -> Path:
    """Where ``rank`` records when ``--record`` is ``base``; a restarted group writes anew."""
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
        self._lock = threading.Lock()  # guards _lost and puts; a leaf
        self._lost = 0
        self._queue: SimpleQueue[Timed | None] = SimpleQueue()
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
            if self._lost or self._queue.qsize() >= self._limit:
                self._lost += 1
            else:
                self._queue.put(timed)

    def close(self) -> None:
        """Write what was put and end the file. Blocks on the disk; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._start is not None:
            self._queue.put(None)
            self._thread.join()
        self._file.close()

    # ------------------------------------------------------------------ writer's thread

    def _write_all(self) -> None:
        assert self._start is not None
        failed = not self._write(MAGIC + self._frame(self._start))
        open_ = True
        while open_:
            batch = self._next_batch()
            open_ = None not in batch
            data = b"".join(encode(timed, self._encoder) for timed in batch if timed is not None)
            data += self._gap()
            if not open_:
                data += self._frame(End())
            failed = failed or not self._write(data)

    def _next_batch(self) -> list[Timed | None]:
        batch = [self._queue.get()]
        while len(batch) < BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except Empty:
                break
        return batch

    def _gap(self) -> bytes:
        """The gap that stands here, once all that came before it is out of the queue."""
        with self._lock:
            if not self._lost or not self._queue.empty():
                return b""
            lost, self._lost = self._lost, 0
        logger.warning(
            "%s lacks %d entries: its disk is slow; what follows them cannot be replayed",
            self.path,
            lost,
        )
        return self._frame(Gap(lost=lost))

    def _frame(self, entry: Entry) -> bytes:
        return encode(Timed(time.monotonic_ns(), entry), self._encoder)

    def _write(self, data: bytes) -> bool:
        """Whether all of ``data`` was written; if not, the recording has ended."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            logger.error("%s ends here, serving goes on: %s", self.path, error.strerror)
            return False
        return True
