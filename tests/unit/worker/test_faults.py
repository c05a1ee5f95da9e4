"""Pins that faults happen only where a test asked for them, and never outside test mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from mstar_tp.cli.main import main
from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError
from mstar_tp.engine.resources.lora.cpu_cache.reads import Read
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.testing.faults import (
    AnyFault,
    BadFrame,
    FailRead,
    FaultFile,
    FaultyRank,
    SlowRead,
    WrongBytes,
    write_faults,
)
from mstar_tp.wire.values import AdapterKey

KEY = AdapterKey("a", 0)


def _copy() -> LoadedAdapter:
    ones = {"t": torch.ones(1)}
    return LoadedAdapter(
        key=KEY, digest="0123", lora_rank=1, scaling={}, a=dict(ones), b=dict(ones)
    )


class InlineReaders:
    """Runs a read where it is started; ``results`` is what each came to."""

    def __init__(self) -> None:
        self.results: list[LoadedAdapter | Exception] = []

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        try:
            self.results.append(work())
        except Exception as error:
            self.results.append(error)

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        work()

    def close(self) -> None:
        pass


@pytest.fixture
def file(tmp_path: Path) -> FaultFile:
    write_faults(tmp_path / "faults.json", [])
    return FaultFile(tmp_path / "faults.json")


def _read(file: FaultFile, rank: int) -> LoadedAdapter | Exception:
    readers = InlineReaders()
    file.wrap(rank)(readers).start(Read(KEY, 1), _copy)
    (result,) = readers.results
    return result


def _is_right(result: LoadedAdapter | Exception) -> bool:
    wanted = torch.ones(1)
    return (
        isinstance(result, LoadedAdapter)
        and result.digest == "0123"
        and torch.equal(result.b["t"], wanted)
    )


def test_without_a_fault_a_read_is_what_it_was(file: FaultFile) -> None:
    assert _is_right(_read(file, 0))


@pytest.mark.parametrize("kind", [FailRead, WrongBytes])
def test_a_fault_hits_its_rank_and_adapter_alone(file: FaultFile, kind: type[AnyFault]) -> None:
    file.write([kind(rank=1, adapter="a")])
    assert _is_right(_read(file, 0))
    assert not _is_right(_read(file, 1))
    file.write([kind(rank=1, adapter="b")])
    assert _is_right(_read(file, 1))


def test_a_failed_read_says_its_cause(file: FaultFile) -> None:
    file.write([FailRead(cause="the cable is out")])
    result = _read(file, 0)
    assert isinstance(result, OSError) and str(result) == "the cable is out"


def test_wrong_bytes_have_another_digest_and_other_weights(file: FaultFile) -> None:
    file.write([WrongBytes()])
    result = _read(file, 0)
    assert isinstance(result, LoadedAdapter)
    assert result.digest != "0123" and torch.equal(result.b["t"], -torch.ones(1))


def test_a_slow_read_goes_on_when_its_fault_is_taken_back(file: FaultFile) -> None:
    file.write([SlowRead(seconds=3600)])
    readers = InlineReaders()
    thread = threading.Thread(target=lambda: file.wrap(0)(readers).start(Read(KEY, 1), _copy))
    thread.start()
    assert readers.results == []
    file.write([])
    thread.join(60)
    (result,) = readers.results
    assert _is_right(result)


@pytest.mark.parametrize("text", ["", "{}", '[{"type": "NoSuchFault"}]', '[{"type": "SlowRead"}]'])
def test_a_file_that_holds_no_faults_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"faults\.json"):
        FaultFile(path)


def test_faults_outside_test_mode_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MSTAR_TP_TEST_MODE", raising=False)
    assert env.faults_file() is None
    monkeypatch.setenv("MSTAR_TP_FAULTS", "some.json")
    with pytest.raises(ConfigError, match="MSTAR_TP_TEST_MODE"):
        env.faults_file()
    assert main(["serve", str(tmp_path)]) == 1
    assert "MSTAR_TP_FAULTS" in capsys.readouterr().err
    monkeypatch.setenv("MSTAR_TP_TEST_MODE", "1")
    assert env.faults_file() == "some.json"


def test_a_test_mode_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_TP_TEST_MODE", "yes")
    with pytest.raises(ConfigError, match="MSTAR_TP_TEST_MODE is 'yes'"):
        env.faults_file()


STREAMS: tuple[tuple[int, int, Literal["schedule", "reports"]], ...] = (
    *((0, 1, "schedule"), (1, 1, "schedule")),
    *((0, 1, "reports"), (0, 2, "schedule")),
)


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("dropped", [b"0", b"2", b"3"]),
        ("doubled", [b"0", b"1", b"1", b"2", b"3"]),
        ("late", [b"0", b"2", b"1", b"3"]),
    ],
)
def test_one_frame_of_one_ranks_stream_is_hit_in_the_epoch_asked_for(
    file: FaultFile, what: Literal["dropped", "doubled", "late"], wanted: list[bytes]
) -> None:
    hit, other, reports, later = (
        FaultyRank(file, rank, epoch).frames(stream) for rank, epoch, stream in STREAMS
    )
    frames: list[list[bytes]] = [[], [], [], []]
    for number in range(4):
        if number == 1:
            file.write([BadFrame(what=what, rank=0, epoch=1)])
        for sent, tamper in zip(frames, (hit, other, reports, later), strict=True):
            sent.extend(tamper(b"%d" % number))
    assert frames == [wanted, *([[b"0", b"1", b"2", b"3"]] * 3)]
