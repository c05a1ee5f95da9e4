"""A draw depends on the seed and the position alone, and follows the distribution the parameters
ask for.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar_tp.engine.sampling.sampler import (
    NOT_FINITE,
    Sampled,
    SampleFailed,
    SampleRow,
    sample,
    uniform,
)
from mstar_tp.wire.values import SamplingParams

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


def _params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, **changes)  # type: ignore[arg-type]


def _row(params: SamplingParams, tokens: tuple[int, ...] = (0,), prompt_len: int = 1) -> SampleRow:
    return SampleRow(params=params, tokens=tokens, prompt_len=prompt_len)


def _draws(params: dict[str, object], count: int = 2000, **row: object) -> Counter[int]:
    drawn: Counter[int] = Counter()
    for seed in range(count):
        rows = [_row(_params(seed=seed, **params), **row)]  # type: ignore[arg-type]
        drawn[sample(LOGITS[None], rows)[0].token] += 1
    return drawn


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(3, p) for p in range(100)} | {uniform(s, 5) for s in range(100)}) == 199


def test_uniform_numbers_are_uniform() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(100)]
    assert all(0 <= u < 1 for u in numbers)
    mean = sum(numbers) / len(numbers)
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / len(numbers))


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    wanted = torch.softmax(LOGITS / 0.7, dim=-1)
    drawn = _draws({"temperature": 0.7})
    for token, p in enumerate(wanted.tolist()):
        assert abs(drawn[token] / 2000 - p) < 5 * math.sqrt(p * (1 - p) / 2000)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    rows = [
        _row(_params(seed=i, temperature=0.9, top_p=0.8 if i % 2 else 1.0), tuple(range(i + 1)))
        for i in range(6)
    ]
    together = [s.token for s in sample(logits, rows)]
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0].token for i in range(6)]
    order = [4, 2, 0, 5, 1, 3]
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert [s.token for s in shuffled] == [together[i] for i in order]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.7}, {2, 3}),
        ({"min_p": 0.3}, {2, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.1}, {1, 2, 3}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_name(
    changes: dict[str, object], allowed: set[int]
) -> None:
    assert set(_draws({"temperature": 1.0, **changes}, 600)) == allowed


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert sample(torch.zeros(1, 7), [_row(_params(temperature=0))])[0].token == 0


@given(st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_equal_the_formula_written_out(
    repetition: float, frequency: float, presence: float
) -> None:
    params = _params(
        temperature=0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    tokens = (4, 2, 3, 3, 1)
    wanted = LOGITS.double().tolist()
    for token in set(tokens):
        wanted[token] = (
            wanted[token] / repetition if wanted[token] > 0 else wanted[token] * repetition
        )
    for token, count in Counter(tokens[2:]).items():
        wanted[token] -= frequency * count + presence
    best = max(wanted)
    chosen = sample(LOGITS[None], [_row(params, tokens, prompt_len=2)])[0].token
    assert wanted[chosen] >= best - 1e-5


def test_biases_and_the_penalty_on_repetition_are_those_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    for case in range(60):
        logits = 4 * torch.randn(1, 40, generator=generator)
        tokens = torch.randint(40, (1, 12), generator=generator)
        ids = sorted(set(torch.randint(40, (5,), generator=generator).tolist()))
        bias = [(id_, float(id_ % 7 - 3) * 1.5) for id_ in ids]
        penalty = 1 + case % 4 / 2
        wanted = SequenceBiasLogitsProcessor({(id_,): by for id_, by in bias})(tokens, logits)
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(tokens, wanted)
        given = {"logit_bias": tuple(bias), "repetition_penalty": penalty, "seed": case}
        before, all_tokens = logits.clone(), tuple(tokens[0].tolist())
        for changes in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}):
            row = _row(_params(**given, **changes), all_tokens)
            plain = _row(_params(seed=case, **changes), all_tokens)
            assert sample(logits, [row])[0].token == sample(wanted, [plain])[0].token
        assert torch.equal(logits, before)


def test_no_stop_token_before_min_tokens() -> None:
    params = _params(temperature=0, min_tokens=2, stop_token_ids=(3,))
    assert sample(LOGITS[None], [_row(params, (0, 1), 1)])[0].token == 2
    assert sample(LOGITS[None], [_row(params, (0, 1, 1), 1)])[0].token == 3


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    params = _params(temperature=0.3, seed=1, logprobs=2, frequency_penalty=1.5)
    drawn = sample(LOGITS[None], [_row(params, (3, 3), 1)])[0]
    wanted = torch.log_softmax(LOGITS.double(), dim=-1)
    assert drawn.logprobs is not None
    assert drawn.logprobs.top_ids == (3, 2)
    assert drawn.logprobs.top == pytest.approx([wanted[3].item(), wanted[2].item()], abs=1e-6)
    assert drawn.logprobs.chosen == pytest.approx(wanted[drawn.token].item(), abs=1e-6)


def test_raw_logits_mode_reports_the_logits_themselves() -> None:
    drawn = sample(LOGITS[None], [_row(_params(temperature=0, logprobs=1))], "raw_logits")[0]
    assert drawn.logprobs is not None
    assert drawn.logprobs.chosen == 3.0


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-320, "min_p": 0.1},
        {"temperature": 1e-308, "top_p": 0.9},
        {"temperature": 0.7, "repetition_penalty": 1e-38, "top_p": 0.9},
        {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (0, 1, 2, 3, 4), "top_p": 0.5},
    ],
)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_no_row_can_end_the_step_of_its_neighbours(
    changes: dict[str, object], bad: float | None
) -> None:
    logits = torch.stack([LOGITS, LOGITS, LOGITS])
    if bad is not None:
        logits[1, 2] = bad
    plain = _row(_params(temperature=0))
    first, middle, last = sample(logits, [plain, _row(_params(**changes), (1, 3), 1), plain])
    assert first == last == Sampled(3, None)
    if bad is not None:
        assert middle == SampleFailed(NOT_FINITE)
    elif "min_tokens" in changes:
        assert isinstance(middle, SampleFailed)


def test_a_vanishing_temperature_is_greedy() -> None:
    assert sample(LOGITS[None], [_row(_params(temperature=1e-320))]) == [Sampled(3, None)]


def test_a_greedy_row_of_nan_logits_fails_alone() -> None:
    logits = torch.stack([LOGITS, LOGITS * float("nan")])
    rows = [_row(_params(temperature=0))] * 2
    assert sample(logits, rows) == [Sampled(3, None), SampleFailed(NOT_FINITE)]
