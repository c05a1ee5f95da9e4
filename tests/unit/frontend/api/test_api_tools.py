"""Tools, formats, priorities and the best of several answers, through the official client: what the
ranks are told, and what comes back of what they write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.api_kit import Api

from mstar_tp.wire.commands import NewRequest

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }},{% endfor %}"
    "{% endif %}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
END = 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("tools"), chat=TEMPLATE, policy="priority", context=128)
    yield api
    api.close()


@pytest.fixture
def api(served: Api) -> Iterator[Api]:
    served.ranks.reset()
    yield served
    served.ranks.go()


def test_a_call_comes_whole_and_streamed_as_the_client_knows_it(api: Api) -> None:
    api.answer(CALL, then=END)
    asked = {"model": "tiny", "messages": CHAT, "tools": [WEATHER, CLOCK]}
    client = api.client()
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert (call.type, call.function.name, call.function.arguments) == (
        "function", "weather", '{"a": 1}'
    )  # fmt: skip
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == ("weather", '{"a": 1}')
    assert not streamed.message.content and again.id != call.id


def test_templates_read_tools_and_earlier_calls_as_objects(api: Api) -> None:
    history = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "é"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
    ]
    client = api.client()
    for choice, head in (("auto", "<tool_call>weather,"), ("none", "")):
        client.chat.completions.create(
            model="tiny",
            messages=history,
            tools=[WEATHER],
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=1,
        )
        prompt = api.ranks.messages(NewRequest)[-1].prompt
        text = api.tokenizer.decode(prompt, skip_special_tokens=False)
        assert text == head + '<|user|>hi<|assistant|>{"city": "é"}<|tool|>wet<|assistant|>'


def test_what_holds_an_answer_goes_to_the_ranks(api: Api) -> None:
    client, schema = api.client(), {"type": "object", "properties": {"a": {"type": "integer"}}}

    def grammar(**fields: Any) -> Any:
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1, **fields)
        held = api.ranks.messages(NewRequest)[-1].params.grammar
        return held and (held.kind, json.loads(held.text), held.field)

    assert grammar() is None
    assert grammar(tools=[WEATHER]) is None
    assert grammar(response_format={"type": "text"}) is None
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert grammar(response_format=wanted) == ("json_schema", schema, "response_format")
    held = grammar(response_format={"type": "json_object"})
    assert held == ("json_schema", {"type": "object"}, "response_format")
    kind, forced, field = grammar(tools=[WEATHER, CLOCK], tool_choice="required")
    assert (kind, field) == ("structural_tag", "tools")
    begins = [tag["begin"] for tag in forced["format"]["tags"]]
    assert begins == [f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in ("weather", "clock")]
    assert not forced["format"]["stop_after_first"]
    named: Any = {"type": "function", "function": {"name": "clock"}}
    _, forced, _ = grammar(tools=[WEATHER, CLOCK], tool_choice=named)
    assert len(forced["format"]["tags"]) == 1 and forced["format"]["stop_after_first"]
    kind, either, field = grammar(tools=[CLOCK], response_format=wanted)
    assert field == "response_format" and either["format"]["type"] == "or"


def test_a_grammar_that_no_rank_can_build_is_the_clients_fault(api: Api) -> None:
    api.ranks.fail = lambda request: "response_format: no such thing"
    api.ranks.fault_of = "response_format"
    with pytest.raises(openai.BadRequestError, match="no such thing") as bad:
        api.client().chat.completions.create(
            model="tiny", messages=CHAT, response_format={"type": "json_object"}
        )
    assert bad.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"not": {}}}}},
                }
            },
            "response_format.json_schema.schema.properties.a.not",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_its_path(
    api: Api, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.client().chat.completions.create(model="tiny", messages=CHAT, extra_body=fields)
    assert bad.value.param == param


def test_the_best_of_several_answers_are_given_likeliest_first(api: Api) -> None:
    worth: dict[int, float] = {}

    def chosen(request: NewRequest) -> float:
        return worth.setdefault(request.rid, [-3.0, -1.0, -2.0, -0.5][len(worth) % 4])

    api.ranks.chosen = chosen
    done = api.client().completions.create(
        model="tiny", prompt=["a", "b"], n=2, best_of=4, max_tokens=3, logprobs=0, seed=5
    )
    assert done.usage is not None and done.usage.completion_tokens == 2 * 4 * 3
    told = [
        (choice.index, choice.logprobs.token_logprobs)
        for choice in done.choices
        if choice.logprobs is not None
    ]
    assert [index for index, _ in told] == [0, 1, 2, 3]
    assert [each[0] for _, each in told if each] == [-0.5, -1.0, -0.5, -1.0]
    plain = api.client().completions.create(model="tiny", prompt="a", best_of=2, max_tokens=2)
    assert len(plain.choices) == 1 and plain.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="best_of: must equal n"):
        api.client().completions.create(model="tiny", prompt="a", best_of=2, stream=True)


def test_priorities_and_biases_reach_the_ranks(api: Api) -> None:
    api.client().completions.create(
        model="tiny", prompt="a", max_tokens=1, logit_bias={"7": -100, "5": 1.5},
        extra_body={"priority": -4},
    )  # fmt: skip
    (request,) = api.ranks.messages(NewRequest)
    assert request.priority == -4
    assert request.params.logit_bias == ((5, 1.5), (7, -100.0))


def test_fields_that_are_not_known_are_named_in_a_warning(api: Api) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "metadata": {}, "né\n": 1}
    with api.http() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["warning"].startswith("299 mstar-tp ")
        assert "metadata, n??" in answer.headers["warning"]
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            assert "metadata" in stream.headers["warning"]
        plain = {"model": "tiny", "prompt": "a", "max_tokens": 1, "user": "me"}
        assert "warning" not in http.post("/v1/completions", json=plain).headers
