"""The three forms in which models write tool calls, and the grammars of these forms.

* ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each
* ``llama3_json``: an answer that is ``{"name": …, "parameters": {…}}`` and nothing else
* ``mistral``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or a name and its arguments bare
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mstar_tp.wire.values import Grammar

FormName = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """One form.

    ``opening``: what calls begin with, empty where an answer begins with them; ``closing``: what
    ends them and lets text go on; ``separator``: between two calls; ``around``: what grammars put
    around all calls; ``call``: a call's texts before and after its arguments.
    """

    name: FormName
    opening: str
    closing: str
    separator: str
    around: tuple[str, str]
    call: tuple[str, str]
    several: bool
    """True when one answer may hold several calls."""
    id_chars: int
    """The length of the ids that calls are given: some templates take no others."""


HERMES = ToolForm(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    around=("", ""),
    call=('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
    several=True,
    id_chars=24,
)
LLAMA = ToolForm(
    name="llama3_json",
    opening="<|python_tag|>",
    closing="",
    separator="; ",
    around=("", ""),
    call=('{"name": "%s", "parameters": ', "}"),
    several=False,
    id_chars=24,
)
MISTRAL = ToolForm(
    name="mistral",
    opening="[TOOL_CALLS]",
    closing="",
    separator=", ",
    around=("[TOOL_CALLS][", "]"),
    call=('{"name": "%s", "arguments": ', "}"),
    several=True,
    id_chars=9,
)
FORMS: dict[str, ToolForm] = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def form_of_template(source: str) -> ToolForm | None:
    """The form that a chat template tells its model to write, None where it knows none."""
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<|python_tag|>" in source or '"parameters": dictionary of argument' in source:
        return LLAMA
    return None


def calls_grammar(
    form: ToolForm,
    functions: Sequence[tuple[str, dict[str, Any]]],
    *,
    several: bool,
    instead: dict[str, Any] | None = None,
) -> Grammar:
    """Return the grammar of one call at least, or with ``several`` of any number.

    ``functions``: name and JSON schema of its arguments. Where ``instead`` is given, an answer of
    that schema is taken too.
    """
    tags = [
        {
            "type": "tag",
            "begin": form.call[0] % name,
            "content": {"type": "json_schema", "json_schema": schema},
            "end": form.call[1],
        }
        for name, schema in functions
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not (several and form.several),
    }
    if form.around != ("", ""):
        before, after = ({"type": "const_string", "value": text} for text in form.around)
        calls = {"type": "sequence", "elements": [before, calls, after]}
    if instead is not None:
        answer = {"type": "json_schema", "json_schema": instead}
        calls = {"type": "or", "elements": [calls, answer]}
    tag = {"type": "structural_tag", "format": calls}
    field = "tools" if instead is None else "response_format"
    return Grammar(kind="structural_tag", text=msgspec.json.encode(tag).decode(), field=field)
