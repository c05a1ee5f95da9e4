"""Choosing tokens from logits: on the leader alone, on its step thread.

A draw depends on the request's seed and the token's position and on nothing else: the uniform
number comes from a
counter-based generator (Philox 4x64, Salmon et al. 2011, as numpy implements it) and is turned into
a token by inverting
the cumulative distribution in vocabulary order, so a change of batch mix or of ``--tp`` moves no
draw.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mstar_tp.engine.sampling.grammar import TokenMask
from mstar_tp.kernels.decode import best_of_rows
from mstar_tp.wire.reports import TokenLogprobs
from mstar_tp.wire.values import SamplingParams

logger = logging.getLogger(__name__)

LogprobsMode = Literal["raw_logprobs", "raw_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """The inputs of sampling from one row of logits; ``tokens`` is prompt + output so far."""

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    grammar: TokenMask | None = None
    request_id: str = ""
    """The request's name in the log."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """No token can be chosen for this row, and why; the other rows are not touched."""

    cause: str


NOT_FINITE = (
    "the model's logits are not finite for this request: its adapter's weights are too large for "
    "the dtype it is served in"
)
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of floats."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on ``seed`` and ``position`` alone."""
    bits = np.random.Philox(key=seed % 2**128, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], mode: LogprobsMode = "raw_logprobs"
) -> list[Sampled | SampleFailed]:
    """One token a row from ``logits`` [num_rows, vocab_size], any float dtype.

    Raises nothing: whatever is wrong with a row fails that row alone.
    """
    tokens, finite = best_of_rows(logits) or _best(logits)
    sampled: list[Sampled | SampleFailed] = []
    for i, row in enumerate(rows):
        if not finite[i]:
            sampled.append(SampleFailed(NOT_FINITE))
        elif row.grammar is None and _plain_greedy(row.params):
            sampled.append(Sampled(tokens[i], None))
        else:
            sampled.append(_sample_row(logits[i].float(), row, mode))
    return sampled


def _best(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Find the best tokens as ``best_of_rows`` does, where it has no kernel."""
    best = logits.argmax(dim=-1)
    # argmax takes a NaN for the largest, so the best logit tells of any.
    finite = logits.gather(1, best.unsqueeze(1)).isfinite().squeeze(1)
    return best.tolist(), finite.tolist()


def score(
    logits_NV: torch.Tensor, tokens: Sequence[int], count: int, mode: LogprobsMode
) -> list[TokenLogprobs]:
    """Return the log probability of the token that followed each row of ``logits_NV`` [N, V].

    With it come the ``count`` best. A row at a time, so that no second matrix is held.
    """
    return [
        _measured(logits_V.float(), token, count, mode)
        for logits_V, token in zip(logits_NV, tokens, strict=True)
    ]


def _sample_row(
    logits_V: torch.Tensor, row: SampleRow, mode: LogprobsMode
) -> Sampled | SampleFailed:
    try:
        adjusted_V = _adjust(logits_V, row)
        if not adjusted_V.max().isfinite():
            held = "" if row.grammar is None else "the answer's grammar, "
            return SampleFailed(
                f"{held}penalties, biases and banned tokens leave no token to choose"
            )
        token = _choose(adjusted_V, row)
        return Sampled(token, _logprobs(logits_V, token, row.params.logprobs, mode))
    except Exception as error:
        # One row's trouble must not end a step that other requests are in.
        logger.exception("a row could not be sampled", extra={"request_id": row.request_id})
        return SampleFailed(f"this request could not be sampled: {type(error).__name__}: {error}")


def _plain_greedy(params: SamplingParams) -> bool:
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and params.min_tokens == 0
        and not params.logit_bias
        and not is_penalised(params)
    )


def is_penalised(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _adjust(logits_V: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Return the logits after biases, penalties and bans; the input is left as it is.

    Banned are ends before ``min_tokens``, and what the grammar does not allow.
    """
    params = row.params
    output = row.tokens[row.prompt_len :]
    banned = params.stop_token_ids if len(output) < params.min_tokens else ()
    if not (banned or params.logit_bias or row.grammar is not None or is_penalised(params)):
        return logits_V
    logits_V = logits_V.clone()
    if params.logit_bias:
        biased, by = zip(*params.logit_bias, strict=True)
        logits_V[torch.tensor(biased, device=logits_V.device)] += torch.tensor(
            by, device=logits_V.device
        )
    if is_penalised(params):
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(row.tokens)), device=logits_V.device)
            chosen = logits_V[seen]
            scale = params.repetition_penalty
            logits_V[seen] = torch.where(chosen > 0, chosen / scale, chosen * scale)
        if output:
            ids = torch.tensor(output, device=logits_V.device)
            counts = torch.bincount(ids, minlength=logits_V.shape[0])
            logits_V -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if banned:
        logits_V[torch.tensor(banned, device=logits_V.device)] = -torch.inf
    if row.grammar is not None:
        row.grammar.apply(logits_V, output)
    return logits_V


def _choose(logits_V: torch.Tensor, row: SampleRow) -> int:
    params = row.params
    if params.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    logits_V = logits_V.double()
    probs_V = torch.softmax((logits_V - logits_V.max()) / params.temperature, dim=-1)
    probs_V = _keep_min_p(
        _keep_top_p(_keep_top_k(probs_V, params.top_k), params.top_p), params.min_p
    )
    cumulative_V = probs_V.cumsum(dim=-1)
    target = uniform(params.seed, len(row.tokens)) * float(cumulative_V[-1])
    index = int(torch.searchsorted(cumulative_V, target, right=True))
    return min(index, int(probs_V.nonzero()[-1]))


def _keep_top_k(probs_V: torch.Tensor, top_k: int) -> torch.Tensor:
    if not 0 < top_k < probs_V.shape[0]:
        return probs_V
    kept = probs_V.topk(top_k).indices
    return torch.zeros_like(probs_V).index_copy_(0, kept, probs_V[kept])


def _keep_top_p(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens that sum to at least ``top_p``.

    Their probabilities are renormalised.
    """
    if top_p >= 1:
        return probs_V
    ordered, ids = probs_V.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ids[before < top_p * ordered.sum()]
    return torch.zeros_like(probs_V).index_copy_(0, kept, probs_V[kept])


def _keep_min_p(probs_V: torch.Tensor, min_p: float) -> torch.Tensor:
    if min_p <= 0:
        return probs_V
    return torch.where(probs_V >= min_p * probs_V.max(), probs_V, 0.0)


def _logprobs(
    logits_V: torch.Tensor, token: int, count: int | None, mode: LogprobsMode
) -> TokenLogprobs | None:
    return None if count is None else _measured(logits_V, token, count, mode)


def _measured(logits_V: torch.Tensor, token: int, count: int, mode: LogprobsMode) -> TokenLogprobs:
    values_V = logits_V if mode == "raw_logits" else torch.log_softmax(logits_V, dim=-1)
    top = values_V.topk(min(count, values_V.shape[0]))
    return TokenLogprobs(
        chosen=float(values_V[token]),
        top_ids=tuple(top.indices.tolist()),
        top=tuple(top.values.tolist()),
    )
