"""Patterns of module names mean what PEFT makes of them, and none costs what it may cost ``re``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from support.adapter_kit import SPEC, refusal

from mstar_tp.lora.format.patterns import Endings, PatternTable
from mstar_tp.testing.lora_files import q_pairs, write_adapter


def first_match(patterns: Iterable[str], module: str) -> str:
    """As PEFT answers: the first pattern that matches, else the module's own name."""
    found = PatternTable({pattern: pattern for pattern in patterns}).get(module)
    return module if found is None else found


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        r".*\.0\..*",
        "^model.layers.0.self_attn.q_proj",
    ],
)
def test_patterns_match_as_peft_matches_them(pattern: str) -> None:
    module = "model.layers.0.self_attn.q_proj"
    table = {"k_proj": 1, pattern: 9}
    assert first_match(table, module) == get_pattern_key(table.keys(), module) == pattern


def test_the_first_pattern_that_matches_wins_and_a_partial_name_does_not() -> None:
    module = "model.layers.0.self_attn.q_proj"
    assert first_match(["q_proj", "self_attn.q_proj"], module) == "q_proj"
    assert first_match(["proj"], module) == module


@pytest.mark.parametrize(
    "pattern",
    [
        "(q|k)_proj",
        r"model\.layers\.(?:0|1[0-9])\.self_attn\.[qk]_proj$",
        r"layers\.\d+\..*",
        r"layers.[^0]+\.self_attn.q_proj",
        "self_attn.q_pr?oj?",
        "attn.q_proj",
        "q_pro{1,2}j",
        r"\w+",
        "k_proj|",
        "layers.(1|(2|0)).self_attn.+?",
        "",
    ],
)
def test_accepted_patterns_mean_what_re_makes_of_them(pattern: str) -> None:
    for layer, name in ((0, "self_attn.q_proj"), (12, "self_attn.k_proj"), (1, "mlp.up_proj")):
        module = f"model.layers.{layer}.{name}"
        assert first_match([pattern], module) == get_pattern_key([pattern], module)


names = st.lists(st.text("ab1", min_size=1, max_size=2), min_size=1, max_size=4).map(".".join)


@settings(max_examples=300, deadline=None)
@given(
    modules=st.lists(names, min_size=1, max_size=3),
    patterns=st.lists(
        st.one_of(
            names,
            st.text("ab1.", min_size=1, max_size=6),
            names.map(lambda name: name.replace(".", r"\.")),
            names.map(lambda name: name.replace("a", ".*", 1)),
        ),
        max_size=8,
        unique=True,
    ),
)
def test_a_table_of_patterns_answers_as_trying_one_after_another(
    modules: list[str], patterns: list[str]
) -> None:
    """Look-ups by name must find what a dot or an earlier pattern would have matched."""
    for module in modules:
        assert first_match(patterns, module) == get_pattern_key(patterns, module)


@settings(max_examples=200, deadline=None)
@given(
    endings=st.lists(st.text("ab.", max_size=3), max_size=6, unique=True),
    modules=st.lists(names, max_size=3),
)
def test_endings_answer_as_trying_one_after_another(endings: list[str], modules: list[str]) -> None:
    table = Endings(endings)
    ends = [e for e in endings if any(module.endswith(e) for module in modules)]
    assert table.first(modules) == next(iter(ends), None)
    assert table.without(modules) == [e for e in endings if e not in ends]


def test_a_pattern_for_every_module_of_a_large_model_is_looked_up_not_tried() -> None:
    modules = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(40) for e in range(128)]
    table = PatternTable({module: number for number, module in enumerate(modules)})
    assert [table.get(module) for module in modules] == list(range(len(modules)))


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(([a-z0-9_.]+)+)+X", "repeats a group"),
        ("(a|b)*X", "repeats a group"),
        (r"(.)\1", "not accepted"),
        ("(?=q)q_proj", "(?"),
        ("(?i)q_proj", "(?"),
        (".*.*.*.*X", "more than 3"),
        ("q++_proj", "no repeat"),
        ("q_proj{2", "no repeat"),
        ("(" * 20 + ")" * 20, "deep"),
        ("(q_proj", "does not end"),
        ("q_proj)", "nothing opened"),
        ("q{3,2}", "wrong way round"),
        ("[z-a]", "no class"),
        ("a" * 201, "201 characters"),
    ],
)
def test_a_pattern_that_could_take_for_ever_is_refused_by_name(
    tmp_path: Path, key: str, pattern: str, why: str
) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), **{key: {pattern: 4}}))
    assert key in text and why in text and "dotted ends" in text and len(text) < 1000


def test_alternatives_cost_no_more_than_their_length() -> None:
    module = "a" * 60
    assert first_match(["(aa|a|.)" * 24 + "X"], module) == module


def test_patterns_that_are_more_than_names_are_few(tmp_path: Path) -> None:
    many = {f"m{n}.*": 4 for n in range(101)}
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), alpha_pattern=many))
    assert "alpha_pattern has 101 patterns that are more than names, wanted at most 100" in text
