"""Reading a recording back, also one whose writer was killed in the middle of a frame."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mstar_tp.common.errors import RecordingError
from mstar_tp.recording.entries import FORMAT, End, Gap, Start, Timed, schema_hash
from mstar_tp.recording.recorder import FRAME, MAGIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One rank's recording; ``entries`` follow its start and are whole up to ``note``."""

    path: Path
    start: Start
    entries: tuple[Timed, ...]
    note: str | None
    """Why the entries end before the rank did: killed, torn, a gap; None when they are whole."""


class _Tail(Exception):  # noqa: N818  # not an error: a recording that was cut off is still read
    """The frame at an offset is not whole."""


def read_recording(path: Path) -> Recording:
    """The recording at ``path``, as far as it is whole.

    Raises:
        RecordingError: it cannot be read, is no recording, or was made by another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    if data[: len(MAGIC)] != MAGIC:
        raise RecordingError(f"{path}: is no recording: it does not begin with {MAGIC.decode()}")
    offset = len(MAGIC)
    try:
        payload, offset = _frame(data, offset)
    except _Tail as tail:
        raise RecordingError(f"{path}: holds nothing: its first entry {tail}") from None
    start = _start(path, payload)
    decoder = msgspec.msgpack.Decoder(Timed)
    entries: list[Timed] = []
    note: str | None = "its rank was killed: there is no end"
    while offset < len(data):
        try:
            payload, following = _frame(data, offset)
            timed = decoder.decode(payload)
        except (_Tail, msgspec.MsgspecError) as error:
            left = len(data) - offset
            note = f"the last {left} bytes, from byte {offset}, are left out: the entry {error}"
            break
        offset = following
        if isinstance(timed.entry, Gap):
            note = f"{timed.entry.lost} entries are missing after entry {len(entries)}: slow disk"
            break
        if isinstance(timed.entry, End):
            note = None
            break
        entries.append(timed)
    return Recording(path=path, start=start, entries=tuple(entries), note=note)


def find_recording(path: Path) -> Path:
    """``path``, or rank 0's recording when ``path`` is what ``--record`` was given."""
    leader = path.with_name(path.name + ".rank0")
    return leader if not path.exists() and leader.exists() else path


def _start(path: Path, payload: memoryview) -> Start:
    """The first entry. Who made it is looked at first, so another version's is named as such."""
    try:
        _, raw = msgspec.msgpack.decode(payload)
        got = (raw["format"], raw["schema"])
        version = raw["version"]
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
        raise RecordingError(f"{path}: its first entry is no start of a recording") from None
    if got != (FORMAT, schema_hash()):
        raise RecordingError(
            f"{path}: was recorded by mstar_tp {version} with entries of another layout: replay it "
            "with the code that recorded it"
        )
    entry = msgspec.msgpack.decode(payload, type=Timed).entry
    assert isinstance(entry, Start)
    return entry


def _frame(data: bytes, offset: int) -> tuple[memoryview, int]:
    """The payload of the frame at ``offset`` and where the next begins. Raises _Tail."""
    begin = offset + FRAME.size
    if begin > len(data):
        raise _Tail("is cut off")
    size, crc = FRAME.unpack_from(data, offset)
    payload = memoryview(data)[begin : begin + size]
    if len(payload) < size:
        raise _Tail("is cut off")
    if zlib.crc32(payload) != crc:
        raise _Tail("is damaged")
    return payload, begin + size
