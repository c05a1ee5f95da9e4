"""Pins that a request is served as it is written, or refused with 400 naming the field.

No message repeats what was sent, and every default is resolved (cases D11, D13, D15, D17, D19).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.api.body import parse
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.text.request_params import Limits, check_prompt, derive_seed, sampling_params

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LIMITS = Limits(max_model_len=64, vocab_size=32, eos_ids=(2, 3), max_logprobs=5)


def _refusal(kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    error: dict[str, Any] = json.loads(caught.value.body().decode("utf-8"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def _completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())


def _chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())


SHARED: list[tuple[str, Any]] = [
    ("model", 1),
    ("model", ""),
    ("lora_adapter", ["x"]),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 1000),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 100),
    ("stop_token_ids", [1, "2"]),
    ("stop_token_ids", [-1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("user", 7),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}),
    ("priority", 1.5),
    # Not served, and the answer would differ without them:
    ("prompt_logprobs", 0),
    ("use_beam_search", True),
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a+"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "root"),
    ("structured_outputs", {"regex": "a"}),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [1]),
    ("truncate_prompt_tokens", 4),
]
COMPLETION_ONLY: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", []),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [1, True]),
    ("prompt", [1.0]),
    ("logprobs", True),
    ("logprobs", -1),
    ("best_of", 0),
    ("response_format", {"type": "json_object"}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("echo", 1),
    ("suffix", "end"),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", {}),
    ("messages", []),
    ("messages", ["hi"]),
    ("messages", [{"content": "hi"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("echo", True),
    ("max_completion_tokens", 0),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tool_choice", "sometimes"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "g"}}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ),
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", "x"),
]


def _top(path: str) -> str:
    """The field that a path begins with."""
    return path.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]


@pytest.mark.parametrize(("field", "value"), SHARED + COMPLETION_ONLY)
def test_a_completion_is_refused_by_its_fields_name(field: str, value: Any) -> None:
    error = _refusal(CompletionRequest, json.dumps({**COMPLETION, field: value}).encode())
    assert _top(error["param"]) == field
    assert error["param"] in error["message"]


@pytest.mark.parametrize(("field", "value"), SHARED + CHAT_ONLY)
def test_a_chat_is_refused_by_its_fields_name(field: str, value: Any) -> None:
    error = _refusal(ChatRequest, json.dumps({**CHAT, field: value}).encode())
    assert _top(error["param"]) == field
    assert error["param"] in error["message"]


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(field: str) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != field}
    assert _refusal(CompletionRequest, json.dumps(body).encode())["param"] == field


def test_a_message_never_repeats_what_was_sent() -> None:
    secret = "swordfish" * 1000
    for field in ("temperature", "stop_token_ids", "stream", "n", "max_tokens", "logit_bias"):
        error = _refusal(CompletionRequest, json.dumps({**COMPLETION, field: secret}).encode())
        assert "swordfish" not in error["message"]
        assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"[" * 100_000,
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert _refusal(CompletionRequest, body)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model": "m\ud800", "prompt": "a"}', "model"),
        (rb'{"model": "m", "prompt": ["a", "\udc00b"]}', "prompt"),
        (rb'{"model": "m", "prompt": "a", "stop": ["\ud83c!"]}', "stop"),
        (rb'{"model": "m", "prompt": "a", "tools": [{"name": "\ud800"}]}', "tools"),
        (b'{"model": "m", "prompt": "\xff"}', "prompt"),
        (b'{"model": "m", "prompt": "\xed\xa0\x80"}', "prompt"),
    ],
)
def test_text_that_is_no_unicode_is_refused_by_its_fields_name(body: bytes, param: str) -> None:
    assert _refusal(CompletionRequest, body)["param"] == param


def test_paired_surrogates_and_nul_are_text() -> None:
    request = parse(CompletionRequest, rb'{"model": "m", "prompt": "\ud83c\udf0d\u0000"}')
    assert request.prompt == ["\U0001f30d\x00"]


def test_errors_are_valid_utf8_whatever_they_name() -> None:
    body = ApiError.unknown_model("x\ud800" * 200).body()
    assert len(json.loads(body.decode("utf-8"))["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, wanted: list[Any]) -> None:
    assert _completion(prompt=prompt).prompt == wanted


def test_unknown_fields_nulls_and_harmless_values_change_nothing() -> None:
    harmless = {
        "new_field": {"a": 1},
        "temperature": None,
        "stop": None,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "n": 1,
        "stream": True,
        "stream_options": {"verbose": 1},
    }
    assert _chat(**harmless).unknown_fields == ["new_field", "stream_options.verbose"]
    assert _completion(**harmless, echo=False, suffix=None, best_of=1).choices == 1
    assert _chat(**harmless, tools=[], tool_choice="auto", modalities=["text"]).stop == ()
    tool = {"type": "function", "function": {"name": "f"}}
    assert not _chat(tools=[tool], tool_choice="none").offers_tools


def test_text_parts_of_a_message_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = _chat(messages=[{"role": "user", "content": parts, "name": "n"}])
    assert request.messages == [{"role": "user", "content": "a\nb", "name": "n"}]


def test_a_continued_message_takes_no_turn_of_its_own() -> None:
    assert _chat().opens_turn
    assert not _chat(continue_final_message=True).opens_turn
    both = {**CHAT, "continue_final_message": True, "add_generation_prompt": True}
    error = _refusal(ChatRequest, json.dumps(both).encode())
    assert error["param"] == "continue_final_message"


def test_every_default_is_resolved() -> None:
    params = sampling_params(_completion(), 10, LIMITS, 7, "prompt")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.seed, params.stop_token_ids, params.logprobs) == (7, (2, 3), None)
    # What the context leaves: a completion's default is clamped to it, a chat's is all of it.
    assert sampling_params(_completion(), 60, LIMITS, 0, "prompt").max_tokens == 4
    assert sampling_params(_chat(), 10, LIMITS, 0, "messages").max_tokens == 54


def test_an_echo_asks_for_no_more_scores_than_a_frame_carries() -> None:
    request = _completion(echo=True, logprobs=2, max_tokens=0)
    wide = dataclasses.replace(LIMITS, max_model_len=1 << 21)
    assert sampling_params(request, 999_999, wide, 0, "prompt").prompt_logprobs == 2
    with pytest.raises(ApiError, match="logprobs: 2 for each of 1000001 prompt tokens"):
        sampling_params(request, 1_000_001, wide, 0, "prompt")


def test_what_is_asked_for_is_what_the_ranks_are_told() -> None:
    request = _chat(
        max_completion_tokens=5,
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        stop_token_ids=[9, 2],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    params = sampling_params(request, 10, LIMITS, 1, "messages")
    assert (params.max_tokens, params.min_tokens, params.temperature) == (5, 2, 0.0)
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert (params.repetition_penalty, params.stop_token_ids, params.logprobs) == (1.5, (9, 2), 3)
    assert sampling_params(_chat(logprobs=True), 1, LIMITS, 1, "messages").logprobs == 0


def _limit_error(body: CompletionRequest | ChatRequest, prompt_len: int, field: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_prompt((5,) * prompt_len, LIMITS, field)
        sampling_params(body, prompt_len, LIMITS, 0, field)
    assert caught.value.status == 400
    return caught.value


def test_more_than_the_context_is_refused_with_every_length() -> None:
    error = _limit_error(_completion(max_tokens=100), 60, "prompt")
    assert error.code == "context_length_exceeded"
    assert error.param == "max_tokens"
    assert all(length in error.message for length in ("60", "100", "64"))
    error = _limit_error(_chat(), 70, "messages")
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "70" in error.message
    assert "64" in error.message
    assert sampling_params(_completion(max_tokens=4), 60, LIMITS, 0, "prompt").max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 20}, "min_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"stop_token_ids": [32]}, "stop_token_ids"),
    ],
)
def test_limits_of_the_model_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert _limit_error(_completion(**fields), 10, "prompt").param == param


@pytest.mark.parametrize("prompt", [(), (32,), (-1,)])
def test_an_empty_prompt_and_ids_out_of_range_are_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(ApiError) as caught:
        check_prompt(prompt, LIMITS, "prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_the_answers_of_one_request_have_seeds_of_their_own_that_repeat() -> None:
    seeds = [derive_seed(7, place) for place in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert seeds == [derive_seed(7, place) for place in range(128)]
    assert all(-(2**63) <= derive_seed(seed, 3) < 2**63 for seed in (-(2**63), 2**63 - 1))
