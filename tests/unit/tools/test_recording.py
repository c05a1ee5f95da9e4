"""Pins that a recording keeps every entry in order, says what it lacks, and survives its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from mstar_tp.common.errors import ConfigError, RecordingError
from mstar_tp.recording import FileRecorder, recording_path
from mstar_tp.recording.entries import (
    FORMAT,
    Entry,
    Opened,
    Ran,
    Start,
    recorded_command,
    schema_hash,
)
from mstar_tp.recording.reader import Recording, find_recording, read_recording
from mstar_tp.recording.recorder import BATCH, FRAME, MAGIC
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.values import AdapterKey, SamplingParams

START = Start(
    format=FORMAT,
    schema=schema_hash(),
    version="test",
    rank=0,
    world_size=1,
    epoch=0,
    config_digest="d",
    num_pages=4,
    page_size=16,
    lora=(),
)


def entry(n: int) -> Entry:
    return Ran(tp_seq=n, failed=(), ended=(), refused=False)


def record(path: Path, *entries: Entry) -> None:
    recorder = FileRecorder(path)
    for each in entries:
        recorder.put(each)
    recorder.start(START)
    recorder.close()


def steps(recording: Recording) -> list[int]:
    return [t.entry.tp_seq for t in recording.entries if isinstance(t.entry, Ran)]


def test_entries_come_back_in_the_order_they_were_put(tmp_path: Path) -> None:
    path = tmp_path / "a"
    recorder = FileRecorder(path)
    recorder.put(entry(0))
    recorder.start(START)
    for n in range(1, 5000):
        recorder.put(entry(n))
    recorder.close()
    recorder.close()
    recording = read_recording(path)
    assert recording.start == START
    assert steps(recording) == list(range(5000))
    assert recording.note is None
    times = [timed.at_ns for timed in recording.entries]
    assert times == sorted(times)


def test_nothing_a_client_wrote_is_recorded() -> None:
    key = AdapterKey("a", 1)
    request = NewRequest(
        rid=3, prompt=(11, 12), params=SamplingParams(max_tokens=1, seed=77), adapter=key
    )
    assert recorded_command(request) == Opened(rid=3, num_prompt=2, adapter=key)
    again = msgspec.structs.replace(request, output=(13, 14, 15))
    assert recorded_command(again) == Opened(rid=3, num_prompt=2, adapter=key, num_output=3)


def test_a_recording_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"--record: .*a exists already"):
        FileRecorder(path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="cannot be created"):
        FileRecorder(tmp_path / "none" / "a")


def test_ranks_and_restarts_have_files_of_their_own(tmp_path: Path) -> None:
    assert str(recording_path("x.rec", 1, 0)) == "x.rec.rank1"
    assert str(recording_path("x.rec", 0, 2)) == "x.rec.epoch2.rank0"
    (tmp_path / "x.rec.rank0").touch()
    assert find_recording(tmp_path / "x.rec").name == "x.rec.rank0"
    assert find_recording(tmp_path / "x.rec.rank0").name == "x.rec.rank0"


def test_a_recording_cut_at_any_byte_is_read_up_to_there(tmp_path: Path) -> None:
    path, cut = tmp_path / "a", tmp_path / "cut"
    record(path, *(entry(n) for n in range(3)))
    data = path.read_bytes()
    whole = steps(read_recording(path))
    begin = len(MAGIC)
    begin += FRAME.size + FRAME.unpack_from(data, begin)[0]
    for size in range(begin, len(data)):
        cut.write_bytes(data[:size])
        recording = read_recording(cut)
        assert recording.note is not None
        assert steps(recording) == whole[: len(recording.entries)]
    for size in range(len(MAGIC)):
        cut.write_bytes(data[:size])
        with pytest.raises(RecordingError, match="is no recording"):
            read_recording(cut)
    for size in range(len(MAGIC), begin):
        cut.write_bytes(data[:size])
        with pytest.raises(RecordingError, match="holds nothing"):
            read_recording(cut)


def test_a_damaged_byte_ends_the_recording_before_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "a"
    record(path, *(entry(n) for n in range(3)))
    data = bytearray(path.read_bytes())
    data[-30] ^= 0x40
    path.write_bytes(data)
    recording = read_recording(path)
    assert recording.note is not None and "is damaged" in recording.note
    assert steps(recording) == [0, 1, 2][: len(recording.entries)]


def test_another_versions_recording_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    recorder = FileRecorder(path)
    recorder.start(
        Start(**{f: getattr(START, f) for f in START.__struct_fields__} | {"schema": "other"})
    )
    recorder.close()
    with pytest.raises(RecordingError, match="recorded by mstar_tp test with entries of another"):
        read_recording(path)


class StuckFile:
    """A file whose first write waits until ``go`` is set."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.reached, self.go = threading.Event(), threading.Event()

    def write(self, data: bytes) -> int:
        self.reached.set()
        assert self.go.wait(60)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


def test_what_a_slow_disk_loses_is_counted_where_it_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    recorder = FileRecorder(path, limit=4)
    stuck = StuckFile(recorder._file)
    recorder._file = stuck  # type: ignore[assignment]
    recorder.start(START)
    assert stuck.reached.wait(60)
    for n in range(10):  # none of them waits: 4 have a place, 6 are lost
        recorder.put(entry(n))
    stuck.go.set()
    recorder.close()
    recording = read_recording(path)
    assert steps(recording) == [0, 1, 2, 3]
    assert recording.note == "6 entries are missing after entry 4: slow disk"


def test_a_flush_has_written_what_was_put_and_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rec"
    recorder = FileRecorder(path)
    recorder.start(START)
    for n in range(3 * BATCH):
        recorder.put(entry(n))
    assert recorder.flush(60.0)
    assert [timed.entry for timed in read_recording(path).entries] == [
        entry(n) for n in range(3 * BATCH)
    ]
    stuck = StuckFile(recorder._file)
    recorder._file = stuck  # type: ignore[assignment]
    recorder.put(entry(0))
    assert not recorder.flush(0.01)
    stuck.go.set()
    recorder.close()


def test_a_full_disk_ends_the_recording_and_not_the_rank(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    script = f"""
import resource, signal
from pathlib import Path
from tests.unit.tools.test_recording import START, FileRecorder, entry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
recorder = FileRecorder(Path({str(path)!r}))
recorder.start(START)
for n in range(5000):
    recorder.put(entry(n))
recorder.close()
print("served on")
"""
    ended = _python(script)
    assert ended.stdout == "served on\n"
    assert "ends here, serving goes on: File too large" in ended.stderr
    recording = read_recording(path)
    assert path.stat().st_size == 2000
    assert steps(recording) == list(range(len(recording.entries)))
    assert recording.note is not None


def test_a_killed_rank_leaves_all_that_its_writer_had_taken(tmp_path: Path) -> None:
    path = tmp_path / "a"
    script = f"""
import os, signal
from pathlib import Path
from tests.unit.tools.test_recording import START, FileRecorder, entry
recorder = FileRecorder(Path({str(path)!r}))
write, calls = recorder._write, []
def write_then_die(data):
    written = write(data)
    calls.append(data)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return written
recorder._write = write_then_die
for n in range(100):
    recorder.put(entry(n))
recorder.start(START)
recorder._thread.join()
"""
    ended = _python(script)
    assert ended.returncode == -signal.SIGKILL
    recording = read_recording(path)
    assert steps(recording) == list(range(BATCH)), (
        "the first write is the start, the second a batch"
    )
    assert recording.note == "its rank was killed: there is no end"


def _python(script: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[3])
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
        cwd=root,
    )
