"""Pins how scripts/real_model_check.py finds the first different token, and what is a tie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import real_model_check as real


def reference(margins: tuple[float, ...] = (5.0, 0.0005, 3.0)) -> real.Reference:
    return real.Reference(
        prompt="p", prompt_tokens=4, prefixes=(" a", " a b", " a b c"), margins=margins
    )


@pytest.mark.parametrize(
    ("text", "place"), [(" a b c", None), (" x", 0), (" a x", 1), (" a b x", 2), (" a b c d", 2)]
)
def test_the_first_different_token_is_found(text: str, place: int | None) -> None:
    assert reference().first_difference(text) == place


def test_a_token_that_ends_inside_a_character_is_not_a_difference() -> None:
    split = real.Reference(
        prompt="p", prompt_tokens=4, prefixes=(" \ufffd", " é", " é!"), margins=(1.0, 1.0, 1.0)
    )
    assert split.first_difference(" é?") == 2


def test_a_difference_counts_unless_the_reference_was_nearly_tied_there() -> None:
    wanted = [reference()] * 4
    got = [(" a b c", 4), (" a x", 4), (" a b x", 4), (" a b c", 5)]
    _, wrong = real.compare(wanted, got, tie=1e-3, title="t")
    assert wrong == 2  # the wide margin, and the prompt that was counted differently
