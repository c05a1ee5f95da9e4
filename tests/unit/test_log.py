"""Pins the log's form: one handler however often it is set up, and who speaks in every line."""

from __future__ import annotations

import logging

import pytest

from mstar_tp import log


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a freshly set-up process writes to stderr."""
    root = logging.getLogger("mstar_tp")
    before, level = root.handlers[:], root.level
    root.handlers = []
    monkeypatch.setattr(log, "_process", {"rank": "-", "role": "-", "seq": "-"})

    def written() -> list[str]:
        return capsys.readouterr().err.splitlines()

    yield written
    root.handlers = before
    root.setLevel(level)


def test_every_line_says_rank_role_and_step(lines) -> None:
    log.setup("leader", 0)
    log.setup("leader", 0)
    log.at_step(41)
    logging.getLogger("mstar_tp.engine.runner").info("step took %d rows", 7)
    (line,) = lines()
    assert "INFO rank=0 role=leader seq=41 mstar_tp.engine.runner: step took 7 rows" in line


def test_outside_a_rank_the_prefix_says_so(lines) -> None:
    log.setup("frontend")
    logging.getLogger("mstar_tp").warning("hello")
    assert "WARNING rank=- role=frontend seq=- mstar_tp: hello" in lines()[0]


def test_a_span_tells_its_time_when_asked_for_and_nothing_otherwise(lines, monkeypatch) -> None:
    monkeypatch.setenv("MSTAR_TP_LOG_LEVEL", "INFO")
    log.setup("leader", 0)
    with log.span("forward"):
        pass
    assert lines() == []
    monkeypatch.setenv("MSTAR_TP_LOG_LEVEL", "DEBUG")
    log.setup("leader", 0)
    with pytest.raises(KeyError), log.span("forward"):
        raise KeyError("x")
    assert "forward took" in lines()[0]
