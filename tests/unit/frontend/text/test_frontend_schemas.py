"""Which schemas are refused, by their paths; what a grammar holds tokens to, against jsonschema."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import jsonschema
import pytest
import torch

from mstar_tp.engine.sampling import grammar
from mstar_tp.engine.sampling.grammar import GrammarFault, GrammarMask, Grammars, Vocabulary
from mstar_tp.engine.sampling.sampler import Sampled, SampleRow, sample
from mstar_tp.frontend.api.api_errors import FieldError
from mstar_tp.frontend.text.schemas import check_schema
from mstar_tp.frontend.text.tool_calls import ToolCallReader
from mstar_tp.frontend.text.tool_choice import Structure
from mstar_tp.frontend.text.tool_forms import FORMS, calls_grammar
from mstar_tp.wire.values import Grammar, SamplingParams

END = 300
WORDS = ["name", "age", '": ', '{"', '"}', "true", "[TOOL_CALLS]", "<tool_call>", ", ", "12"]
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), *[b""] * 44],
    (END,),
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "at": {"type": "string", "format": "date"},
        "of": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
        "code": {"type": "string", "pattern": "^[A-C]{2}[0-9]?$"},
    },
    "required": ["name", "age", "mood", "tags", "at", "of", "code"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 10}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


WOKEN = threading.Event()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY, WOKEN.set)


def built(grammars: Grammars, grammar: Grammar) -> GrammarMask | GrammarFault:
    """What the builder's own thread makes of it."""
    grammars.build(1, grammar)
    assert WOKEN.wait(120)
    WOKEN.clear()
    ((rid, mask),) = grammars.built()
    assert rid == 1
    return mask


def write(mask: GrammarMask, seed: int, *, again: GrammarMask | None = None) -> str:
    """An answer of random logits, each token drawn under the mask; with ``again``, that mask goes
    on from the middle with the tokens there are, as after a restart.
    """
    noise = torch.Generator().manual_seed(seed)
    lively = random.Random(seed)
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=seed)
    tokens = [0]
    while True:
        logits = torch.randn(1, 310, generator=noise) * 2
        logits[0, [32, 9, 10, 13]] -= 8  # white space and
        logits[0, [34, 125, 93, END]] += 3  # ends are what keep an answer short
        if again is not None and len(tokens) > lively.randint(3, 30):
            mask, again = again, None
        row = SampleRow(params=params, tokens=tokens, prompt_len=1, grammar=mask)
        (drawn,) = sample(logits, [row])
        assert isinstance(drawn, Sampled), drawn
        if drawn.token == END:
            return b"".join(VOCABULARY.tokens[token] for token in tokens[1:]).decode()
        tokens.append(drawn.token)
        assert len(tokens) < 2000


def test_answers_under_a_schema_are_valid_whatever_the_logits(grammars: Grammars) -> None:
    grammar = Grammar(kind="json_schema", text=check_schema(PERSON, "s"), field="response_format")
    texts = []
    for seed in range(6):
        masks = [built(grammars, grammar) for _ in range(3)]
        assert all(isinstance(mask, GrammarMask) for mask in masks)
        texts.append(write(masks[0], seed))  # type: ignore[arg-type]
        # The same draws, with a matcher that is made anew on the way: the same answer.
        assert write(masks[1], seed, again=masks[2]) == texts[-1]  # type: ignore[arg-type]
    checker = jsonschema.FormatChecker()
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON, format_checker=checker)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_forced_calls_are_calls_of_the_tools_with_valid_arguments(
    grammars: Grammars, form: str
) -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    tools = [("move_to", point), ("stop", {"type": "object", "additionalProperties": False})]
    names = set()
    for seed in range(4):
        mask = built(grammars, calls_grammar(FORMS[form], tools, several=seed % 2 == 0))
        assert isinstance(mask, GrammarMask)
        reader = ToolCallReader(FORMS[form])
        text = write(mask, seed)
        said, pieces = reader.push(text)
        assert said == "" and reader.finish().text == "" and pieces
        calls: dict[int, list[str]] = {}
        for piece in pieces:
            calls.setdefault(piece.place, [piece.name or "", ""])[1] += piece.arguments
        for name, arguments in calls.values():
            names.add(name)
            jsonschema.validate(json.loads(arguments), dict(tools)[name])
        assert seed % 2 == 0 or len(calls) == 1
    assert names == {"move_to", "stop"}


def test_a_schema_that_no_grammar_can_be_made_of_is_a_fault_and_builds_go_on(
    grammars: Grammars,
) -> None:
    bad = Grammar(kind="json_schema", text='{"$ref": "#/$defs/none"}', field="response_format")
    fault = built(grammars, bad)
    assert isinstance(fault, GrammarFault) and "none" in fault.cause
    good = Grammar(kind="json_schema", text='{"type": "object"}', field="response_format")
    assert isinstance(built(grammars, good), GrammarMask)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"multipleOf": 3}}}, "s.properties.a.multipleOf"),
    ({"items": {"uniqueItems": True}}, "s.items.uniqueItems"),
    ({"anyOf": [{"type": "null"}, {"not": {}}]}, "s.anyOf[1].not"),
    ({"if": {}, "then": {}}, "s.if"),
    ({"allOf": [{}, {}]}, "s.allOf"),
    ({"$ref": "http://example.org/x"}, "s.$ref"),
    ({"type": "string", "format": "banana"}, "s.format"),
    ({"maxLength": 10**8}, "s.maxLength"),
    ({"minItems": -1}, "s.minItems"),
    ({"pattern": "(?=a)b"}, "s.pattern"),
    ({"pattern": "((a{100}){100}){100}"}, "s.pattern"),
    ({"pattern": "a" * 1000}, "s.pattern"),
    ({"pattern": 'a"b'}, "s.pattern"),
    ({"pattern": r"a\\b"}, "s.pattern"),
    ({"enum": list(range(5000))}, "s.enum"),
    ({"properties": {"a": 3}}, "s.properties.a"),
    ({"properties": []}, "s.properties"),
    ({"description": "x" * 100_000}, "s"),
    ([], "s"),
]


@pytest.mark.parametrize(("schema", "path"), REFUSED)
def test_what_no_answer_would_be_held_to_is_refused_by_its_path(schema: Any, path: str) -> None:
    with pytest.raises(FieldError) as refused:
        check_schema(schema, "s")
    assert refused.value.field == path


def test_schemas_of_a_limited_depth_are_taken() -> None:
    check_schema(nested(30), "s")
    with pytest.raises(FieldError, match="schemas deep"):
        check_schema(nested(40), "s")


def test_a_schema_that_nothing_matches_is_no_grammar(grammars: Grammars) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    text = check_schema({"$defs": {"a": loop}, "$ref": "#/$defs/a"}, "s")
    fault = built(grammars, Grammar(kind="json_schema", text=text, field="s"))
    assert fault == GrammarFault("cannot be made a grammar: no answer matches it")


def test_a_grammar_that_takes_long_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    class Slow:
        def compile_json_schema(self, text: str, **_: Any) -> None:
            go.wait(60)

    grammars = Grammars(lambda: VOCABULARY, WOKEN.set)
    new = grammars._new_compiler
    monkeypatch.setattr(grammar, "BUILD_S", 0.01)
    for tries in range(grammar.MAX_LATE):
        monkeypatch.setattr(grammars, "_new_compiler", Slow)
        fault = built(grammars, Grammar(kind="json_schema", text="{}", field="s"))
        assert isinstance(fault, GrammarFault) and "takes more than" in fault.cause
        monkeypatch.setattr(grammars, "_new_compiler", new)
        monkeypatch.setattr(grammar, "BUILD_S", 60)
        mask = built(grammars, Grammar(kind="json_schema", text="{}", field="s"))
        if tries < grammar.MAX_LATE - 1:
            assert isinstance(mask, GrammarMask)
        else:
            assert isinstance(mask, GrammarFault) and "waits for others" in mask.cause
        monkeypatch.setattr(grammar, "BUILD_S", 0.01)
        grammars._compiler = None
    go.set()


def test_schemas_of_tools_are_checked_where_an_answer_is_held_to_them() -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    wanted = {"type": "json_object"}
    with pytest.raises(FieldError) as refused:
        Structure.model_validate({"tools": [tool], "response_format": wanted}).check_structure()
    assert refused.value.field == "tools[0].function.parameters.properties.a.not"
    Structure.model_validate({"tools": [tool]}).check_structure()
    large = {"type": "object", "description": "x" * 40_000}
    tools = [{"type": "function", "function": {"name": n, "parameters": large}} for n in "fg"]
    with pytest.raises(FieldError, match="together"):
        Structure.model_validate({"tools": tools, "tool_choice": "required"}).check_structure()
