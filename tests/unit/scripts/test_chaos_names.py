"""Pins how the chaos run knows what a name may answer with: it must accept no wrong answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])


def test_only_a_request_that_overlaps_a_change_may_get_either() -> None:
    from chaos_names import Name

    name = Name("n")
    name.settle(0.0, "old")
    name.begin(10.0, "new")
    name.settle(11.0, "new")
    assert name.could_serve(8.0, 9.0) == {"old"}
    assert name.could_serve(9.0, 10.5) == {"old", "new"}
    assert name.could_serve(10.5, 12.0) == {"old", "new"}
    assert name.could_serve(11.5, 12.0) == {"new"}
    assert name.weights == "new"


def test_a_race_settled_for_one_leaves_the_other_impossible() -> None:
    from chaos_names import Name

    name = Name("n")
    name.settle(0.0, None)
    name.begin(1.0, "a", "b")
    name.settle(2.0, "b")
    assert name.could_serve(1.5, 1.6) == {None, "a", "b"}
    assert name.could_serve(2.1, 3.0) == {"b"}


def test_a_request_may_fail_only_if_it_overlaps_trouble() -> None:
    from chaos_names import Name

    name = Name("n")
    name.begin_fault(5.0)
    assert name.troubled and not name.could_fail(1.0, 4.0) and name.could_fail(4.0, 6.0)
    name.end_fault(7.0)
    assert not name.troubled and not name.could_fail(7.5, 9.0)
