"""Pins what clients get for good requests: the official client reads every form of answer, streamed
and whole answers say the same, and names, usage, choices and log probabilities follow OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_kit import CONTEXT, Api

from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.values import AdapterKey


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("answers"))
    yield api
    api.close()


@pytest.fixture
def api(served: Api) -> Iterator[Api]:
    served.ranks.reset()
    yield served
    served.ranks.go()


CHAT: list[Any] = [{"role": "user", "content": "hi"}]


def events(api: Api, route: str, body: dict[str, Any]) -> list[Any]:
    """Every event's payload, [DONE] checked and left out."""
    with api.http() as http, http.stream("POST", route, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["tiny", "alias", "pirate"])
def test_every_answer_and_chunk_carries_the_name_that_was_asked_for(api: Api, name: str) -> None:
    client = api.client()
    usage: Any = {"include_usage": True}
    chat = client.chat.completions.create(model=name, messages=CHAT, max_tokens=3)
    text = client.completions.create(model=name, prompt="a", max_tokens=3)
    chunks = client.chat.completions.create(
        model=name, messages=CHAT, max_tokens=3, stream=True, stream_options=usage
    )
    pieces = client.completions.create(
        model=name, prompt="a", max_tokens=3, stream=True, stream_options=usage
    )
    names = {chat.model, text.model, *(c.model for c in chunks), *(p.model for p in pieces)}
    assert names == {name}


def test_an_adapters_name_becomes_its_key_and_its_slot_shows(api: Api) -> None:
    client = api.client()
    for name, key, slot in (("tiny", None, "0"), ("pirate", AdapterKey("pirate", 0), "3")):
        raw = client.completions.with_raw_response.create(model=name, prompt="a", max_tokens=2)
        assert raw.headers["x-mstar-slot"] == slot
        assert api.ranks.messages(NewRequest)[-1].adapter == key
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=2, extra_body={"lora_adapter": "pirate"}
    )
    assert raw.parse().model == "pirate" and raw.headers["x-mstar-slot"] == "3"


# ---------------------------------------------------------------------------- usage


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_alone_in_the_last_event_and_only_when_asked_for(api: Api, route: str) -> None:
    ask = {"prompt": "abc"} if route == "/v1/completions" else {"messages": CHAT}
    body = {"model": "tiny", "max_tokens": 5, "temperature": 0, **ask}
    with api.http() as http:
        whole = http.post(route, json=body).json()["usage"]
    got = events(api, route, body | {"stream_options": {"include_usage": True}})
    assert got[-1]["choices"] == [] and got[-1]["usage"] == whole
    assert whole["completion_tokens"] == 5
    assert whole["total_tokens"] == whole["prompt_tokens"] + 5
    assert all(event["usage"] is None for event in got[:-1])
    assert got[-2]["choices"][0]["finish_reason"] == "length"
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        plain = events(api, route, body | options)
        assert not any("usage" in event for event in plain)
        assert plain[-1]["choices"][0]["finish_reason"] == "length"


# ---------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("raw", "text", "finish"),
    [
        ("a,b,c d", "a", "stop"),
        ("a,b,d b", "a,b,d b~~~", "length"),
        ("a,b", "a,b~~~~~~~", "length"),
    ],
)
def test_a_stop_string_over_token_borders_cuts_both_modes_alike(
    api: Api, raw: str, text: str, finish: str
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 10, "stop": [",b,c"]}
    api.answer(raw)
    whole = api.client().completions.create(**body).choices[0]
    assert (whole.text, whole.finish_reason) == (text, finish)
    pieces = events(api, "/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == finish


def test_a_stop_string_may_be_kept_and_may_be_one_string(api: Api) -> None:
    api.answer("one two three")
    create = api.client().completions.create
    keep = {"include_stop_str_in_output": True}
    cut = create(model="tiny", prompt="x", max_tokens=12, stop="two")
    kept = create(model="tiny", prompt="x", max_tokens=12, stop="two", extra_body=keep)
    assert (cut.choices[0].text, kept.choices[0].text) == ("one ", "one two")


@pytest.mark.parametrize(
    ("raw", "tokens", "text"),
    [
        (b"\xc4\x8f", 2, "\u010f"),
        (b"\xf0\x9f\x8c\x8d!", 5, "\U0001f30d!"),
        (b"ok\xf0\x9f\x8c", 5, "ok\ufffd"),
        (b"\xc4 x", 3, "\ufffd x"),
        (b"a\xffb", 3, "a\ufffdb"),
    ],
)
def test_characters_split_over_tokens_read_alike_in_both_modes(
    api: Api, raw: bytes, tokens: int, text: str
) -> None:
    api.answer(raw)
    body = {"model": "tiny", "prompt": "x", "max_tokens": tokens}
    assert api.client().completions.create(**body).choices[0].text == text
    pieces = [event["choices"][0]["text"] for event in events(api, "/v1/completions", body)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces[:-1] if "\ufffd" not in text)


def test_the_models_end_token_stops_an_answer_and_leaves_no_text(api: Api) -> None:
    api.answer("hi", then=1)
    client = api.client()
    ended = client.completions.create(model="tiny", prompt="x", max_tokens=9)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("hi", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 3
    forced = client.completions.create(
        model="tiny", prompt="x", max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert forced.choices[0].finish_reason == "length"
    longer = client.completions.create(
        model="tiny", prompt="x", max_tokens=9, extra_body={"min_tokens": 6}
    )
    assert longer.usage is not None and longer.usage.completion_tokens == 7


# ---------------------------------------------------------------------------- choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_repeats_all_choices_and_makes_them_differ(api: Api, stream: bool) -> None:
    def choices(**options: Any) -> list[str]:
        body = {"model": "tiny", "prompt": "x", "n": 4, "max_tokens": 8, **options}
        if not stream:
            found = api.client().completions.create(**body).choices
            assert [choice.index for choice in found] == [0, 1, 2, 3]
            return [choice.text for choice in found]
        texts = ["", "", "", ""]
        for event in events(api, "/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        return texts

    first = choices(temperature=1, seed=7)
    assert first == choices(temperature=1, seed=7)
    assert len(set(first)) == 4
    assert len(set(choices(temperature=0))) == 1
    assert choices(temperature=1) != choices(temperature=1)


def test_a_batch_of_prompts_is_answered_in_order(api: Api) -> None:
    create = api.client().completions.create
    prompts = ["one", "two", "three"]
    both = create(model="tiny", prompt=prompts, n=2, max_tokens=6, temperature=0)
    alone = [create(model="tiny", prompt=p, max_tokens=6, temperature=0) for p in prompts]
    texts = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [choice.text for choice in both.choices] == texts
    assert [choice.index for choice in both.choices] == list(range(6))
    prompt_tokens = sum(a.usage.prompt_tokens for a in alone if a.usage is not None)
    assert both.usage is not None and both.usage.prompt_tokens == prompt_tokens
    ids = create(model="tiny", prompt=[api.ids(p) for p in prompts], max_tokens=6, temperature=0)
    assert [choice.text for choice in ids.choices] == texts[::2]


# ---------------------------------------------------------------------------- logprobs


def test_completion_logprobs_line_up_with_the_text_in_both_modes(api: Api) -> None:
    api.answer("a,b,c")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "logprobs": 2, "stop": "c"}
    whole = api.client().completions.create(**body).choices[0]
    assert whole.logprobs is not None and whole.text == "a,b,"
    assert whole.logprobs.tokens == list("a,b,")
    assert whole.logprobs.text_offset == [0, 1, 2, 3]
    assert whole.logprobs.token_logprobs == [-0.25] * 4
    assert all(len(top) == 2 for top in whole.logprobs.top_logprobs or [])
    streamed: dict[str, list[Any]] = {}
    for event in events(api, "/v1/completions", body):
        for name, values in event["choices"][0]["logprobs"].items():
            streamed.setdefault(name, []).extend(values)
    assert streamed["tokens"] == whole.logprobs.tokens
    assert streamed["text_offset"] == whole.logprobs.text_offset


def test_an_echo_begins_with_the_prompt_and_its_logprobs_in_both_modes(api: Api) -> None:
    api.answer("a,b,c")
    body = {"model": "tiny", "prompt": "say a", "max_tokens": 5, "stop": "c", "echo": True}
    create = api.client().completions.create
    assert create(**body).choices[0].text == "say aa,b,"
    assert create(**{**body, "prompt": [api.ids("say a")]}).choices[0].text == "say aa,b,"
    whole = create(**body, logprobs=2, n=2)
    assert [choice.text for choice in whole.choices] == ["say aa,b,"] * 2
    told = whole.choices[1].logprobs
    assert told is not None and told.tokens is not None and told.token_logprobs is not None
    assert "".join(told.tokens) == "say aa,b,"
    assert told.token_logprobs[0] is None and told.top_logprobs and told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == [-0.25] * (len(told.tokens) - 1)
    starts = [len("".join(told.tokens[:place])) for place in range(len(told.tokens))]
    assert told.text_offset == starts
    streamed: dict[str, list[Any]] = {}
    text = ""
    for event in events(api, "/v1/completions", {**body, "logprobs": 2}):
        text += event["choices"][0]["text"]
        for name, values in event["choices"][0]["logprobs"].items():
            streamed.setdefault(name, []).extend(values)
    assert text == "say aa,b,"
    assert streamed["tokens"] == told.tokens and streamed["text_offset"] == starts


def test_an_echo_of_no_tokens_is_the_prompt_alone_and_is_scored(api: Api) -> None:
    api.answer("never shown")
    body = {"model": "tiny", "prompt": ["say a", "x"], "max_tokens": 0, "echo": True}
    scored = api.client().completions.create(**body, logprobs=0)
    assert [choice.text for choice in scored.choices] == ["say a", "x"]
    assert [choice.finish_reason for choice in scored.choices] == ["length"] * 2
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    for choice in scored.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text


def test_chat_logprobs_carry_bytes_that_join_to_the_text(api: Api) -> None:
    api.answer("é!")
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 3}
    more = {"logprobs": True, "top_logprobs": 2}
    chat = api.client().chat.completions.create(**body, **more)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(b for token in logprobs.content for b in token.bytes or []) == "é!".encode()
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    none = api.client().chat.completions.create(**body, logprobs=True)
    assert none.choices[0].logprobs is not None and none.choices[0].logprobs.content is not None
    assert none.choices[0].logprobs.content[0].top_logprobs == []
    assert api.client().chat.completions.create(**body).choices[0].logprobs is None


# ---------------------------------------------------------------------------- prompts


def test_a_chat_is_the_templates_text_and_its_default_length_is_the_rest(api: Api) -> None:
    api.client().chat.completions.create(model="tiny", messages=CHAT)
    sent = api.ranks.messages(NewRequest)[-1]
    assert list(sent.prompt) == api.ids("<|user|>hi<|assistant|>")
    assert sent.params.max_tokens == CONTEXT - len(sent.prompt)


def test_a_completions_default_length_is_16_within_the_context(api: Api) -> None:
    create = api.client().completions.create
    short = create(model="tiny", prompt="x").usage
    long = create(model="tiny", prompt=[9] * 60).usage
    assert short is not None and short.completion_tokens == 16
    assert long is not None and long.completion_tokens == 4


def test_a_start_token_makes_the_empty_prompt_a_prompt(tmp_path: Path) -> None:
    api = Api(tmp_path, bos=True)
    try:
        answer = api.client().completions.create(model="tiny", prompt="", max_tokens=2)
        assert answer.usage is not None and answer.usage.prompt_tokens == 1
        assert api.ranks.messages(NewRequest)[-1].prompt == (0,)
    finally:
        api.close()


def test_models_lists_the_base_and_every_adapter(api: Api) -> None:
    cards = {card.id: card for card in api.client().models.list()}
    assert list(cards) == ["tiny", "alias", "pirate"]
    assert cards["pirate"].to_dict()["parent"] == "tiny"
    assert api.client().models.retrieve("pirate").id == "pirate"
