"""Responses, tokens and what is refused, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.api_kit import Api
from test_api_tools import CALL, CHAT, END, TEMPLATE, WEATHER

from mstar_tp.wire.commands import NewRequest

TOOL = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("responses"), chat=TEMPLATE, context=160)
    yield api
    api.close()


@pytest.fixture
def api(served: Api) -> Iterator[Api]:
    served.ranks.reset()
    yield served
    served.ranks.go()


def prompt_of(api: Api) -> str:
    return api.tokenizer.decode(api.ranks.messages(NewRequest)[-1].prompt, False)


def test_a_response_is_the_chat_it_stands_for(api: Api) -> None:
    api.answer("well", then=END)
    client = api.client()
    answer = client.responses.create(
        model="pirate", instructions="be", input="hi", temperature=0, max_output_tokens=9
    )
    assert prompt_of(api) == "<|system|>be<|user|>hi<|assistant|>"
    assert (answer.status, answer.output_text, answer.model) == ("completed", "well", "pirate")
    assert answer.usage is not None and answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    params = api.ranks.messages(NewRequest)[-1].params
    assert (params.max_tokens, params.temperature) == (9, 0)
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "we")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_with_calls_is_read_and_answered(api: Api) -> None:
    api.answer("so " + CALL, then=END)
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": '{"city": "é"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "wet"},
    ]
    client = api.client()
    answer = client.responses.create(model="tiny", input=history, tools=[TOOL])  # type: ignore
    wanted = '<tool_call>weather,<|user|>hi<|assistant|>{"city": "é"}<|tool|>wet<|assistant|>'
    assert prompt_of(api) == wanted
    said, call = answer.output
    assert said.type == "message" and answer.output_text == "so"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"a": 1}')
    with client.responses.stream(model="tiny", input=history, tools=[TOOL]) as stream:  # type: ignore
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output_text == "so" and final.output[1].arguments == '{"a": 1}'  # type: ignore
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("output_item.added", "output_item.done"):
        assert kinds.count(f"response.{kind}") == 2


def test_a_responses_schema_stands_beside_its_type(api: Api) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    api.client().responses.create(model="tiny", input="a", text=wanted, max_output_tokens=1)
    grammar = api.ranks.messages(NewRequest)[-1].params.grammar
    assert grammar is not None and json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"input": []}, "input"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "input[0].content[0].type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         "text.format.schema.not"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"model": "nope"}, "model"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_be_is_refused_by_its_path(
    api: Api, fields: dict[str, Any], param: str
) -> None:
    with api.http() as http:
        answer = http.post("/v1/responses", json={"model": "tiny", "input": "a"} | fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_tokens_of_texts_and_chats_and_back(api: Api) -> None:
    with api.http() as http:
        ids = api.ids("héllo")
        told = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
        assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 160)
        assert len(told["token_strs"]) == len(ids)
        back = http.post("/detokenize", json={"model": "pirate", "tokens": ids}).json()
        assert back == {"prompt": "héllo"}
        chat = http.post("/tokenize", json={"model": "tiny", "messages": CHAT}).json()
        assert api.tokenizer.decode(chat["tokens"], False) == "<|user|>hi<|assistant|>"
        for body in ({}, {"prompt": "a", "messages": CHAT}, {"prompt": 3}, {"model": "x"}):
            assert http.post("/tokenize", json=body).status_code in (400, 404)
        assert http.post("/detokenize", json={"tokens": [-1]}).json()["error"]["param"]
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_embeddings_are_refused_clearly(api: Api) -> None:
    """By a status that the client does not try again after."""
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        api.client().embeddings.create(model="tiny", input="a")
