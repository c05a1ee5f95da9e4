"""Promise: the official client does with this server what OpenAI's documents say it does: every
parameter that is served changes the answer as it says, what is not served is refused with the
client's own exceptions, and fields beside OpenAI's come through ``extra_body``.

A real server with two adapters. What an answer must be is taken from other answers and from the
tokenizers library, never from the field under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from mstar_tp.testing.server import Server

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "launch/demo/model/tokenizer.json"))
PROMPT = "What colour is the sky?"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"model": "base", "temperature": 0}
ON: dict[str, Any] = {"ignore_eos": True}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "size": {"enum": ["big", "small"]}},
    "required": ["sure", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(shared_server: Server, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{shared_server.url}/v1", api_key=api_key, max_retries=0, timeout=120
    )


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {**ON, **fields.pop("extra_body", {})}
    return client.completions.create(**{**GREEDY, "prompt": PROMPT} | fields, extra_body=extra)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": CHAT} | fields)


# ---------------------------------------------------------------------- models, completions


def test_models_are_the_base_and_its_adapters_and_answer_each_otherwise(
    client: openai.OpenAI,
) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {"base", "loud", "odd/name"}
    assert client.models.retrieve("odd/name").id == "odd/name"
    answers = {name: complete(client, model=name, max_tokens=12) for name in cards}
    assert all(answer.model == name for name, answer in answers.items())
    assert len({answer.choices[0].text for answer in answers.values()}) == 3


def test_prompts_may_be_texts_ids_and_batches_of_either(client: openai.OpenAI) -> None:
    other = "Tell me about the sea."
    ids, others = TOKENIZER.encode(PROMPT).ids, TOKENIZER.encode(other).ids
    alone = [complete(client, prompt=p, max_tokens=6).choices[0].text for p in (PROMPT, other)]
    assert complete(client, prompt=ids, max_tokens=6).choices[0].text == alone[0]
    for batch in ([PROMPT, other], [ids, others]):
        answer = complete(client, prompt=batch, max_tokens=6, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [c.text for c in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
        assert answer.usage.prompt_tokens == len(ids) + len(others)
        assert answer.usage.completion_tokens == 24


def test_an_echo_scores_what_was_generated_as_generating_did(client: openai.OpenAI) -> None:
    made = complete(client, prompt=TOKENIZER.encode(PROMPT).ids, max_tokens=5, logprobs=3)
    (choice,) = made.choices
    written = choice.logprobs.tokens
    assert "".join(written) == choice.text and len(written) == 5
    # Greedy: the token that was taken is the likeliest of those told.
    for token, value, top in zip(
        written, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3 and value == pytest.approx(max(top.values())) and token in top
    ids = [TOKENIZER.token_to_id(token.replace(" ", "\u0120")) for token in written]
    whole = TOKENIZER.encode(PROMPT).ids + ids
    (scored,) = complete(client, prompt=whole, max_tokens=0, echo=True, logprobs=3).choices
    assert scored.text == PROMPT + choice.text
    told = scored.logprobs.token_logprobs
    assert len(told) == len(whole) and told[0] is None
    assert told[-5:] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)


def test_the_best_of_several_is_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 8, "logprobs": 0}
    best = complete(client, **asked, best_of=4, n=1)
    among = complete(client, **asked, n=4)
    means = [sum(c.logprobs.token_logprobs) / 8 for c in among.choices]
    assert len({choice.text for choice in among.choices}) > 1
    assert best.choices[0].text == among.choices[means.index(max(means))].text
    assert best.usage.completion_tokens == 32
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, best_of=1, n=2)
    assert bad.value.param == "best_of"


def test_a_suffix_is_refused_by_its_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix") as bad:
        complete(client, suffix="the end")
    assert bad.value.param == "suffix" and bad.value.type == "invalid_request_error"


# ---------------------------------------------------------------------- how answers are drawn


def test_seeds_repeat_and_biases_and_stops_hold(client: openai.OpenAI) -> None:
    drawn = [complete(client, temperature=1.2, seed=s, max_tokens=10) for s in (1, 1, 2)]
    first, again, other = (answer.choices[0].text for answer in drawn)
    assert first == again != other
    token = TOKENIZER.encode("sea").ids[0]
    forced = complete(client, logit_bias={str(token): 100}, max_tokens=4).choices[0].text
    assert forced == TOKENIZER.decode([token] * 4)
    free = complete(client, max_tokens=20).choices[0]
    assert free.finish_reason == "length"
    stop = free.text[5:7]
    ended = complete(client, max_tokens=20, stop=[stop]).choices[0]
    assert ended.finish_reason == "stop" and ended.text == free.text[: free.text.index(stop)]


def test_fields_beside_openais_go_through_extra_body(client: openai.OpenAI) -> None:
    token = TOKENIZER.encode("sea").ids[0]
    bias = {"logit_bias": {str(token): 100}, "max_tokens": 9}
    held: dict[str, Any] = {"stop_token_ids": [token], "ignore_eos": False}
    ended = complete(client, **bias, extra_body=held)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    later = complete(client, **bias, extra_body={**held, "min_tokens": 4})
    assert later.choices[0].finish_reason == "stop" and later.usage.completion_tokens == 5
    # The demo model ends this answer long before; with ignore_eos it goes on.
    brief = chat(client, max_tokens=60)
    long = chat(client, max_tokens=60, extra_body=ON)
    assert brief.choices[0].finish_reason == "stop" and brief.usage.completion_tokens < 60
    assert long.choices[0].finish_reason == "length" and long.usage.completion_tokens == 60
    assert complete(client, max_tokens=1, extra_body={"priority": 5}).choices
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, extra_body={"priority": "high"})
    assert bad.value.param == "priority"


# ---------------------------------------------------------------------- chats


@pytest.mark.parametrize("model", ["base", "loud"])
def test_a_streamed_chat_is_the_whole_one_with_usage_at_its_end(
    client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {"model": model, "n": 2, "max_tokens": 12, "temperature": 0.8}
    asked |= {"seed": 4, "logprobs": True, "top_logprobs": 2}
    whole = chat(client, **asked)
    texts, tops, usages = ["", ""], [[], []], []  # type: ignore[var-annotated]
    for chunk in chat(client, **asked, stream=True, stream_options={"include_usage": True}):
        assert chunk.model == model
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tops[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert texts == [choice.message.content for choice in whole.choices]
    # How much of the prompt was cached depends on who came before.
    last, wanted = usages[-1], whole.usage
    assert last.prompt_tokens == wanted.prompt_tokens
    assert last.completion_tokens == wanted.completion_tokens
    assert last.total_tokens == last.prompt_tokens + last.completion_tokens
    assert all(usage is None for usage in usages[:-1])
    for choice, streamed in zip(whole.choices, tops, strict=True):
        said = choice.logprobs.content
        assert [entry.token for entry in streamed] == [entry.token for entry in said]
        assert [len(entry.top_logprobs) for entry in said] == [2] * len(said)
        raw = b"".join(bytes(entry.bytes) for entry in said)
        assert choice.message.content in raw.decode()


def test_required_and_named_tools_are_called_with_valid_arguments(client: openai.OpenAI) -> None:
    tools = [WEATHER, CLOCK]
    asked: dict[str, Any] = {"tools": tools, "temperature": 1.0, "seed": 5, "max_tokens": 120}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    (call,) = chat(client, **asked, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**GREEDY | asked | one, messages=CHAT) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    (call,) = final.message.tool_calls
    wanted = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    jsonschema.validate(json.loads(call.function.arguments), wanted[call.function.name])
    free = [chat(client, tools=tools, tool_choice=c, max_tokens=9).usage for c in ("none", "auto")]
    assert free[0].prompt_tokens < free[1].prompt_tokens  # "none" tells the model of no tools
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, tool_choice={"type": "function", "function": {"name": "x"}}, tools=tools)
    assert (bad.value.param or "").startswith("tool_choice")


def test_formats_hold_answers_to_json(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    held = chat(client, response_format=schema, temperature=1.0, seed=6, max_tokens=100).choices[0]
    assert held.finish_reason == "stop"
    jsonschema.validate(json.loads(held.message.content), SCHEMA)
    # Biased to close what it opens: an object of this untrained kind may go on for ever.
    bias = {str(TOKENIZER.encode("}").ids[0]): 100}
    plain = chat(client, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=100)
    assert isinstance(json.loads(plain.choices[0].message.content), dict)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(client, response_format={"type": "xml"})


# ---------------------------------------------------------------------- the rest


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "loud", "input": PROMPT, "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=12)
    as_chat = chat(client, model="loud", max_tokens=12).choices[0].message.content
    assert whole.output_text == as_chat and whole.model == "loud" and whole.usage
    pieces, final = [], None
    for event in client.responses.create(**asked, max_output_tokens=12, stream=True):
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        elif event.type == f"response.{whole.status}":
            final = event.response
    assert final is not None and "".join(pieces) == final.output_text == whole.output_text
    assert final.usage.total_tokens == whole.usage.total_tokens
    with client.responses.stream(**asked | {"model": "base"}) as stream:
        ended = stream.get_final_response()
    assert ended.status == "completed"
    assert ended.output_text == chat(client).choices[0].message.content


def test_failures_are_the_clients_own_exceptions(
    client: openai.OpenAI, shared_server: Server
) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody") as unknown:
        chat(client, model="nobody")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    for fields, param in (
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, "messages[0].content[0].type"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"stream": True, "n": 0}, "n"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            chat(client, **fields)
        assert bad.value.param == param
    with pytest.raises(openai.BadRequestError, match="not served") as refused:
        client.embeddings.create(model="base", input="x")
    assert refused.value.code == "not_supported"
    gone = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        gone.models.list()


def test_unknown_fields_are_named_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, messages=CHAT, max_tokens=2, extra_body={"flavour": "mild"}
    )
    assert "flavour" in raw.headers["warning"] and raw.parse().choices[0].message.content
    plain = client.chat.completions.with_raw_response.create(**GREEDY, messages=CHAT, max_tokens=2)
    assert "warning" not in plain.headers
