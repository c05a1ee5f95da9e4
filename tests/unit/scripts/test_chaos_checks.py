"""Pins that the chaos run's clients let nothing wrong pass: each kind of wrong answer, refusal and
failure is a violation, and what is right is none.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from chaos_clients import Answer, Clients, Question
from chaos_names import Name
from chaos_report import Report
from chaos_world import BASE, World

ANSWERS = {
    BASE: ((10, 11, 12, 13),),
    "old": ((20, 21, 22, 23),),
    "new": ((20, 31, 32, 33),),
}


def _check(question: Question, answer: Answer, name: Name | None = None) -> Report:
    async def check() -> Report:
        world = World(Path(), Path(), ((1, 2),), ANSWERS)
        report = Report()
        names = {} if name is None else {name.name: name}
        clients = Clients(world, names, None, report, random.Random(0))  # type: ignore[arg-type]
        report.ends[clients._check(question, answer)] += 1
        return report

    return asyncio.run(check())


def _name() -> Name:
    """Serves old weights until 10, either until 11, then new ones. In trouble from 20 to 30."""
    name = Name("n")
    name.settle(0.0, None)
    name.settle(1.0, "old")
    name.begin(10.0, "new")
    name.settle(11.0, "new")
    name.begin_fault(20.0)
    name.end_fault(30.0)
    return name


def _answer(at: float, text: str = "", **more: Any) -> Answer:
    return Answer(sent=at, resolved=at, ended=at, text=text, **{"finish": "length", **more})


ASK = Question(name="n", prompt=0, num_tokens=3)
FAILED = "adapter 'n' could not be read on rank 1: gone"


@pytest.mark.parametrize(
    ("at", "text", "kind"),
    [
        (5.0, " w020 w021 w022", None),
        (5.0, " w020 w031 w032", "wrong text"),
        (5.0, " w020 w021", "wrong text"),
        (5.0, " w010 w011 w012", "wrong text"),
        (10.5, " w020 w021 w022", None),
        (10.5, " w020 w031 w032", None),
        (12.0, " w020 w031 w032", None),
        (12.0, " w020 w021 w022", "wrong text"),
        (0.5, " w020 w021 w022", "wrong text"),
    ],
)
def test_an_answer_must_be_that_of_weights_the_name_had(
    at: float, text: str, kind: str | None
) -> None:
    report = _check(ASK, _answer(at, text), _name())
    assert list(report.violations) == ([] if kind is None else [kind])


def test_how_an_answer_ends_is_checked_too() -> None:
    stop = Question(name="n", prompt=0, num_tokens=3, stop=" w021")
    assert not _check(stop, _answer(5.0, " w020", finish="stop"), _name()).violations
    assert _check(stop, _answer(5.0, " w020", finish="length"), _name()).violations
    assert _check(ASK, _answer(5.0, " w020 w021 w022", finish="stop"), _name()).violations


def test_a_client_that_left_must_have_seen_a_beginning_of_the_answer() -> None:
    assert not _check(ASK, _answer(5.0, " w020 w0", left=True), _name()).violations
    assert not _check(ASK, _answer(5.0, left=True), _name()).violations
    assert _check(ASK, _answer(5.0, " w031", left=True), _name()).violations


@pytest.mark.parametrize(
    ("at", "status", "error", "wrong"),
    [
        (0.5, 404, "no such model", False),
        (5.0, 404, "no such model", True),
        (25.0, 500, FAILED, False),
        (15.0, 500, FAILED, True),
        (31.0, 500, FAILED, True),
        (25.0, 500, "adapter could not be read on rank 1", True),
        (25.0, 500, "adapter 'n' could not be read", True),
        (25.0, 503, "try again later", True),
    ],
)
def test_a_failure_needs_a_reason_and_names_adapter_and_rank(
    at: float, status: int, error: str, wrong: bool
) -> None:
    report = _check(ASK, _answer(at, status=status, error=error), _name())
    assert list(report.violations) == (["failure"] if wrong else [])


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("rank 1 step 3: its table of slots differs from the leader's", "divergence"), ("why", "end")],
)
def test_ranks_that_are_gone_are_one_violation_that_says_why(cause: str, kind: str) -> None:
    report = _check(ASK, _answer(25.0, status=503, error=f"the ranks are gone: {cause}"), _name())
    assert report.violations == {kind: 1} and report.gone.is_set()


def test_an_answer_that_fails_half_way_must_have_been_right_so_far() -> None:
    assert not _check(ASK, _answer(25.0, " w020 w031", error=FAILED), _name()).violations
    assert _check(ASK, _answer(25.0, " w020 w021", error=FAILED), _name()).violations


def test_the_base_never_fails() -> None:
    ask = Question(name=BASE, prompt=0, num_tokens=2)
    assert not _check(ask, _answer(5.0, " w010 w011")).violations
    assert _check(ask, _answer(25.0, status=500, error=FAILED)).violations


def test_a_run_without_the_dev_extra_says_what_to_install() -> None:
    script = Path(__file__).parents[3] / "scripts" / "chaos.py"
    code = f"import runpy, sys; sys.modules['aiohttp'] = None; runpy.run_path({str(script)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == (
        "error: chaos.py needs aiohttp: install the dev extra, pip install -e '.[dev]'\n"
    )
