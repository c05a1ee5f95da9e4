"""Promise: answers are what OpenAI's own client reads, whole and streamed, with the name that was
asked for (cases D01, D03), and log probabilities in both shapes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai._models import construct_type
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.frontend_kit import byte_level_folder

from mstar_tp.frontend.api.answers import Answer, AnswerOptions, Delta, Entry, Gathered
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.api.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    usage,
)
from mstar_tp.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from mstar_tp.wire.reports import Token, TokenLogprobs

NAME = 'adapter "é"'
DONE = b"data: [DONE]\n\n"
TEXT = 'a "quoted"\n\u2028 \U0001f30d'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def _format(
    kind: type[Format], tokenizer: TextTokenizer, *, include_usage: bool = False, logprobs: int = 0
) -> Format:
    return kind(NAME, tokenizer, include_usage=include_usage, logprobs=bool(logprobs))


def _gathered(delta: Delta) -> Gathered:
    answer = Gathered()
    answer.add(delta)
    return answer


def _event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2, "a line break inside an event ends it"
    event: dict[str, Any] = json.loads(data[6:].decode("utf-8"))
    return event


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_a_whole_answer_parses_with_the_official_client(
    kind: type[Format], tokenizer: TextTokenizer
) -> None:
    choices = [
        _gathered(Delta(TEXT, [], "stop")),
        _gathered(Delta("", [], "length")),
    ]
    body = json.loads(_format(kind, tokenizer).body(choices, usage(5, 7)))
    model: Any = ChatCompletion if kind is ChatFormat else Completion
    answer = model.model_validate(body, strict=True)
    assert answer.model == NAME
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    first = answer.choices[0]
    assert (first.message.content if kind is ChatFormat else first.text) == TEXT
    counts = (5, 7, 12)
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == counts


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("include_usage", [True, False])
def test_every_event_parses_and_usage_comes_only_where_asked_for(
    kind: type[Format], include_usage: bool, tokenizer: TextTokenizer
) -> None:
    answer = _format(kind, tokenizer, include_usage=include_usage)
    opening = answer.first_chunk(3)
    events = [opening] if opening else []
    events += [answer.chunk(3, Delta(TEXT, [], None)), answer.chunk(3, Delta("", [], "length"))]
    model: Any = ChatCompletionChunk if kind is ChatFormat else Completion
    parsed: list[Any] = []
    for event in map(_event, events):
        parsed.append(construct_type(type_=model, value=event))
        assert ("usage" in event) == include_usage
        assert event.get("usage") is None
        assert (event["model"], event["choices"][0]["index"]) == (NAME, 3)
    assert len({chunk.id for chunk in parsed}) == 1
    assert [chunk.choices[0].finish_reason for chunk in parsed[-2:]] == [None, "length"]
    if kind is ChatFormat:
        assert parsed[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in parsed)
    else:
        text = "".join(chunk.choices[0].text for chunk in parsed)
    assert text == TEXT
    end = answer.end(usage(5, 7))
    assert end.endswith(DONE)
    if include_usage:
        last = _event(end.removesuffix(DONE))
        assert (last["choices"], last["model"], last["id"]) == ([], NAME, parsed[0].id)
        assert last["usage"]["total_tokens"] == 12
    else:
        assert end == DONE


def test_a_stream_that_fails_ends_with_an_error_event(tokenizer: TextTokenizer) -> None:
    end = _format(ChatFormat, tokenizer).failed(ApiError.internal("a rank was lost"))
    assert end.endswith(DONE)
    event = _event(end.removesuffix(DONE))
    assert event["error"]["message"] == "a rank was lost"


def _logprobs(chosen: float, *top: tuple[int, float]) -> TokenLogprobs:
    ids, values = zip(*top, strict=True) if top else ((), ())
    return TokenLogprobs(chosen=chosen, top_ids=ids, top=values)


def _entries(tokenizer: TextTokenizer, text: str) -> list[Entry]:
    """The entries an answer shows for ``text``, byte by byte, with two alternatives each."""
    answer = Answer(tokenizer.detokenizer(()), AnswerOptions())
    single = {tokenizer.token_bytes(id_): id_ for id_ in reversed(range(tokenizer.vocab_size))}
    entries = []
    for byte in text.encode():
        token = single[bytes([byte])]
        logprobs = _logprobs(-0.5, (token, -0.5), (single[b"z"], -math.inf))
        entries += answer.push(Token(rid=0, token=token, logprobs=logprobs)).entries
    return entries


def test_completion_logprobs_are_parallel_lists_with_offsets_into_the_text(
    tokenizer: TextTokenizer,
) -> None:
    entries = _entries(tokenizer, "aéb")
    answer = _format(CompletionFormat, tokenizer, logprobs=2)
    body = json.loads(answer.body([_gathered(Delta("aéb", entries, "stop"))], usage(1, 4)))
    logprobs = Completion.model_validate(body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.tokens is not None
    assert (logprobs.tokens[0], logprobs.tokens[3]) == ("a", "b")
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "z": -9999.0}


def test_chat_logprobs_carry_every_tokens_bytes(tokenizer: TextTokenizer) -> None:
    entries = _entries(tokenizer, "é")
    answer = _format(ChatFormat, tokenizer, logprobs=2)
    body = json.loads(answer.body([_gathered(Delta("é", entries, "stop"))], usage(1, 2)))
    logprobs = ChatCompletion.model_validate(body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]
    tops = logprobs.content[0].top_logprobs
    assert [(top.logprob, top.bytes) for top in tops] == [(-0.5, [0xC3]), (-9999.0, [0x7A])]
    event = _event(answer.chunk(0, Delta("é", entries, None)))
    assert ChatCompletionChunk.model_validate(event).choices[0].logprobs is not None


def test_no_logprobs_are_null(tokenizer: TextTokenizer) -> None:
    answer = _format(ChatFormat, tokenizer)
    assert _event(answer.chunk(0, Delta("x", [], "stop")))["choices"][0]["logprobs"] is None
