"""Tool calls in an answer's text: found the same however the text is cut, and nothing else is."""

from __future__ import annotations

import random

import pytest

from mstar_tp.frontend.text.tool_calls import ToolCallReader, random_id
from mstar_tp.frontend.text.tool_forms import FORMS, form_of_template

Calls = list[tuple[str, str]]

CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"y", "b": [1, {"c": 2}]}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\nbye ',
        "Hi\nbye ",
        [("f", '{"a": "x}\\"y", "b": [1, {"c": 2}]}'), ("g", "{}")],
    ),
    ("hermes", 'a < b <tool c {"a": 1} \n\n', 'a < b <tool c {"a": 1} \n\n', []),
    ("hermes", "x\n<tool_call>\nno</tool_call> y", "x\n<tool_call>\nno</tool_call> y", []),
    ("hermes", 'x <tool_call>{"a": 1}</tool_call> y', 'x <tool_call>{"a": 1}</tool_call> y', []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", 'a <tool_call>{"nam', 'a <tool_call>{"nam', []),
    (
        "llama3_json",
        '\n {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", 'hello {"name": "f"}', 'hello {"name": "f"}', []),
    ("llama3_json", '{"x": 1, "y": [2]}', '{"x": 1, "y": [2]}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g_2{"b": []}',
        "ok",
        [("f", '{"a": 1}'), ("g_2", '{"b": []}')],
    ),
    ("mistral", "[TOOL_CALLS]what else", "[TOOL_CALLS]what else", []),
]


def read(form: str, parts: list[str], *, several: bool = True) -> tuple[str, Calls]:
    reader = ToolCallReader(FORMS[form], several=several)
    said, calls = "", Calls()
    for text, pieces in [*map(reader.push, parts), reader.finish()]:
        said += text
        for piece in pieces:
            if piece.id is not None:
                assert piece.place == len(calls) and piece.name
                calls.append((piece.name, ""))
            name, arguments = calls[piece.place]
            calls[piece.place] = (name, arguments + piece.arguments)
    return said, calls


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    form: str, text: str, said: str, calls: Calls
) -> None:
    assert read(form, [text]) == (said, calls)
    assert read(form, list(text)) == (said, calls)
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(text)), 5))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(form, parts) == (said, calls)


def test_arguments_leave_while_they_are_written() -> None:
    reader = ToolCallReader(FORMS["hermes"])
    assert not reader.push('<tool_call>{"name": "f", "argum').calls[1:]
    (piece,) = reader.push('ents": {"city": "Par').calls
    assert piece.arguments == '{"city": "Par'


def test_of_calls_that_may_not_be_several_the_first_is_taken() -> None:
    form, text, _, calls = CASES[0]
    assert read(form, [text], several=False)[1] == calls[:1]


def test_ids_are_as_long_as_templates_want_them() -> None:
    assert len(random_id(9)) == 9 and random_id(9).isalnum()
    assert random_id(24).startswith("call_")


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_a_templates_own_words_say_the_form(source: str, form: str | None) -> None:
    found = form_of_template(source)
    assert (found and found.name) == form
