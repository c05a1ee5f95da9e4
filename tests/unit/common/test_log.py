"""Pins the log's form: one handler however often it is set up, and who speaks in every line."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from mstar_tp.common import log


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
    logging.getLogger("mstar_tp.engine.step.runner").info("step took %d rows", 7)
    (line,) = lines()
    assert "INFO rank=0 role=leader seq=41 mstar_tp.engine.step.runner: step took 7 rows" in line


def test_outside_a_rank_the_prefix_names_no_rank_and_no_step(lines) -> None:
    log.setup("frontend")
    logging.getLogger("mstar_tp").warning("hello")
    assert "WARNING role=frontend mstar_tp: hello" in lines()[0]


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


def test_json_lines_hold_what_text_lines_hold_and_parse_whatever_is_said(lines) -> None:
    log.setup("leader", 0)
    log.setup("follower", 1, "json")
    log.at_step(7)
    logger = logging.getLogger("mstar_tp.x")
    logger.warning('says "%s"\nin %d lines', "ü\x00", 2)
    with log.about("req-1"):
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("failed")
        # Another thread is busy with something else.
        thread = threading.Thread(target=lambda: logger.info("aside"))
        thread.start()
        thread.join()
    logging.getLogger("uvicorn.error").warning("theirs")
    logging.getLogger("uvicorn.error").info("not an operator's")
    first, second, aside, theirs = map(json.loads, lines())
    assert log.is_json()
    at = first.pop("time")
    assert at.endswith("Z") and "T" in at
    assert first == {
        "level": "WARNING", "logger": "mstar_tp.x", "message": 'says "ü\x00"\nin 2 lines',
        "rank": "1", "role": "follower", "seq": "7",
    }  # fmt: skip
    assert second["request_id"] == "req-1"
    assert "KeyError: 'x'" in second["exception"]
    assert "request_id" not in aside
    assert theirs["message"] == "theirs"


def test_text_lines_say_which_request_they_are_about(lines) -> None:
    log.setup("leader", 0)
    logger = logging.getLogger("mstar_tp.x")
    with log.about("req-1"):
        logger.info("within")
    logger.info("named", extra={"request_id": "req-2"})
    logger.info("without")
    within, named, without = lines()
    assert " request=req-1 mstar_tp.x: within" in within
    assert "request=req-2 " in named
    assert "request=" not in without
