"""Pins the mechanical part of how code here reads: docstrings and sizes."""

from __future__ import annotations

import ast
from pathlib import Path

import check_docstrings
import check_sizes
import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "mstar_tp"


def test_every_docstring_is_a_whole_sentence() -> None:
    found = check_docstrings.check([PACKAGE])
    assert not found, "\n".join(found)


def test_files_functions_classes_and_folders_are_within_their_limits() -> None:
    found = check_sizes.check(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Requests that are being prepared.", None),
        ("Requests of one adapter:\n\nmore", None),
        ("Of requests that are being prepared.", "'Of'"),
        ("That its steps keep busy, at most.", "'That'"),
        ("What a step may take.", "'What'"),
        ("Requests that are being prepared, and\nmore.", "next line"),
    ],
)
def test_fragments_are_told_from_sentences(text: str, said: str | None) -> None:
    fault = check_docstrings.fault(text)
    assert (fault is None) if said is None else (fault is not None and said in fault)


def test_docstrings_below_attributes_are_looked_at() -> None:
    tree = ast.parse('"""A module."""\n\nMAX = 1\n"""Of things."""\n')
    assert [text for _, text in check_docstrings.docstrings(tree)] == ["A module.", "Of things."]


def test_what_is_over_a_limit_is_named(tmp_path: Path) -> None:
    body = "".join(f"    def m{n}(self) -> None: ...\n" for n in range(26))
    long = "def f() -> None:\n" + "    pass\n" * 60
    (tmp_path / "a.py").write_text("class A:\n" + body + long)
    for n in range(20):
        (tmp_path / f"b{n}.py").write_text("")
    (tmp_path / "c.py").write_text("\n" * 451)
    said = "\n".join(check_sizes.check(tmp_path))
    for word in ("A has 26 methods", "f has 61 lines", "451 lines", "22 modules"):
        assert word in said
