"""Commands for the ranks from a checked request: prompts as ids, every default resolved.

Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mstar_tp.frontend.api.api_errors import ApiError, bad_request, prompt_too_long
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.wire.values import Grammar, SamplingParams

MAX_SCORES = 3_000_000
"""Log probabilities of one echoed prompt: some 45 MB, in a frame of at most 64."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat's is the rest of the context."""

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that the ranks said they serve."""

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_logprobs: int
    priorities: bool = False
    """True when requests may ask to be let in before others."""


def check_prompt(prompt: tuple[int, ...], limits: Limits, field: str) -> None:
    """Raises ApiError: the prompt is empty, too long, or holds ids the model has not."""
    if not prompt:
        raise bad_request(
            f"{field}: is empty, and this model's tokenizer adds no start token", param=field
        )
    if len(prompt) >= limits.max_model_len:
        raise prompt_too_long(field, len(prompt), limits.max_model_len)
    highest = max(prompt)
    if highest >= limits.vocab_size or min(prompt) < 0:
        raise bad_request(
            f"{field}: holds a token id outside 0 to {limits.vocab_size - 1}", param=field
        )


def sampling_params(
    body: Body,
    prompt_len: int,
    limits: Limits,
    seed: int,
    field: str,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return how one answer to a prompt of ``prompt_len`` tokens is sampled.

    Raises:
        ApiError: more tokens than the context holds, or another limit is passed.
    """
    max_tokens = _max_tokens(body, prompt_len, limits, field)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens: is {min_tokens}, and at most {max_tokens} tokens can be generated",
            param="min_tokens",
        )
    logprobs = _num_logprobs(body, prompt_len, limits)
    if body.logit_bias and body.logit_bias[-1][0] >= limits.vocab_size:
        raise bad_request(
            f"logit_bias: holds an id outside 0 to {limits.vocab_size - 1}", param="logit_bias"
        )
    if body.priority and not limits.priorities:
        raise bad_request(
            "priority: this server lets nobody in before others: start it with --scheduling-policy "
            "priority, or leave it out",
            param="priority",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=seed,
        stop_token_ids=_stop_ids(body, limits),
        logprobs=logprobs,
        prompt_logprobs=body.num_logprobs if body.echoes else None,
        logit_bias=body.logit_bias,
        grammar=grammar,
    )


def derive_seed(seed: int, place: int) -> int:
    """The seed of a request's ``place``-th answer: the first keeps the request's own."""
    if place == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _max_tokens(body: Body, prompt_len: int, limits: Limits, field: str) -> int:
    room = limits.max_model_len - prompt_len
    wanted, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            wanted, name = body.max_completion_tokens, "max_completion_tokens"
        default = room
    else:
        default = min(COMPLETION_MAX_TOKENS, room)
    if wanted is None:
        return default
    if wanted > room:
        raise _too_long(
            f"{field} and {name}: {prompt_len} prompt tokens and {wanted} tokens of answer "
            f"exceed the model's context of {limits.max_model_len} tokens: shorten the prompt or "
            f"lower {name}",
            name,
        )
    return wanted


def _num_logprobs(body: Body, prompt_len: int, limits: Limits) -> int | None:
    logprobs = body.num_logprobs
    if logprobs is not None and logprobs > limits.max_logprobs:
        raise bad_request(
            f"{body.logprobs_field}: is {logprobs}, and this server gives at most "
            f"{limits.max_logprobs}",
            param=body.logprobs_field,
        )
    if body.echoes and logprobs is not None and prompt_len * (logprobs + 1) > MAX_SCORES:
        raise bad_request(
            f"{body.logprobs_field}: {logprobs} for each of {prompt_len} prompt tokens come to "
            f"more than the {MAX_SCORES} that one answer can carry: lower {body.logprobs_field} or "
            "shorten the prompt",
            param=body.logprobs_field,
        )
    if logprobs is None and body.attempts > body.choices:
        logprobs = 0  # the best answers are chosen by it
    return logprobs


def _stop_ids(body: Body, limits: Limits) -> tuple[int, ...]:
    own = tuple(body.stop_token_ids or ())
    if own and max(own) >= limits.vocab_size:
        raise bad_request(
            f"stop_token_ids: holds an id outside 0 to {limits.vocab_size - 1}",
            param="stop_token_ids",
        )
    ends = () if body.ignore_eos else limits.eos_ids
    return tuple(dict.fromkeys(ends + own))


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")
