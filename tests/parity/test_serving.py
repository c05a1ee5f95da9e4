"""Served answers are transformers + PEFT's: tokens equal, logits within 1e-4, however they are
batched.

Float32, random weights, every family, adapters of ranks 3, 8 and 16 on all seven linears; real rank
processes at tp 1, 2 and 4; prompts longer and shorter than the step's token budget, so prefill is
chunked for some and whole for others; each request in a mixed batch with base rows, and then alone,
when all of its prompt's full pages but those of its last token are kept.

Every two of tp, overlap and budget meet, and each family meets both budgets, both ways of running
and two tps. All families at all tps: ``distributed/test_models_tp.py`` without adapters,
``test_adapter_kinds.py`` with ranks as threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.instance import Generation, Instance

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.testing.tiny_models import (
    FAMILIES,
    MOE_TARGETS,
    Family,
    make_adapter,
    make_tiny_model,
)
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

NUM_TOKENS = 6
PAGE_SIZE = 4
RANKS = {"low": 3, "mid": 8, "high": 16}
PROMPTS = [9, 33, 5, 20, 41, 12, 3, 27]
MODELS = ["low", None, "mid", "high", None, "low", "high", None]
"""One row each of a batch of eight: prompt length and adapter."""
TOLERANCE = 1e-4
"""Of the largest logit: float32 sums over a few hundred terms, in another order on each side."""


@dataclass
class Expected:
    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # [NUM_TOKENS, vocab]


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 200, (length,), generator=generator).tolist()


def _greedy(model: Any, prompt: list[int]) -> Expected:
    ids, logits = list(prompt), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            last = model(torch.tensor([ids])).logits[0, -1]
            logits.append(last)
            ids.append(int(last.argmax()))
    return Expected(prompt, ids[len(prompt) :], torch.stack(logits))


@dataclass
class Reference:
    """A model folder with its adapters, and what transformers + PEFT answer."""

    folder: Path
    expected: list[Expected]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Family, Reference]]:
    torch.set_num_threads(1)
    families: tuple[Family, ...] = (*FAMILIES, "qwen3_moe")
    yield {family: _reference(family, tmp_path_factory.mktemp(family)) for family in families}


def _reference(family: Family, folder: Path) -> Reference:
    import transformers
    from peft import PeftModel

    model_folder = make_tiny_model(folder / "model", family, seed=3)
    for seed, (name, rank) in enumerate(RANKS.items()):
        make_adapter(folder / name, model_folder, rank=rank, targets=MOE_TARGETS, seed=seed)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base.eval(), folder / "low", adapter_name="low")
    for name in ("mid", "high"):
        tuned.load_adapter(folder / name, adapter_name=name)
    tuned.eval()
    expected = []
    for length, name in zip(PROMPTS, MODELS, strict=True):
        if name is None:
            with tuned.disable_adapter():
                expected.append(_greedy(tuned, _prompt(length)))
        else:
            tuned.set_adapter(name)
            expected.append(_greedy(tuned, _prompt(length)))
    return Reference(folder, expected)


def _config(reference: Reference, tp: int, budget: int, overlap: bool) -> ServeConfig:
    engine = {
        "model": str(reference.folder / "model"),
        "tensor_parallel_size": tp,
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": budget,
        "block_size": PAGE_SIZE,
        "async_scheduling": overlap,
        "logprobs_mode": "raw_logits",
        "lora": {
            "adapters": {name: str(reference.folder / name) for name in RANKS},
            "max_loras": 3,
            "max_lora_rank": 32,
        },
    }
    return build_config({"engine": engine}, source="test")


def _check(generation: Generation, expected: Expected, what: str) -> None:
    assert generation.failed is None, what
    assert generation.ids == expected.tokens, what
    for position, token in enumerate(generation.tokens):
        assert token.logprobs is not None
        served = torch.empty(len(token.logprobs.top))
        served[list(token.logprobs.top_ids)] = torch.tensor(token.logprobs.top)
        wanted = expected.logits[position]
        worst = float((served - wanted).abs().max() / wanted.abs().max())
        assert worst < TOLERANCE, f"{what}, token {position}: logits differ by {worst:.2e}"
    assert not math.isnan(worst)


def _requests(
    expected: list[Expected],
) -> list[tuple[list[int], SamplingParams, AdapterKey | None]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=1 << 20)
    keys = [None if name is None else AdapterKey(name, FIRST_GENERATION) for name in MODELS]
    return [(e.prompt, params, key) for e, key in zip(expected, keys, strict=True)]


CHUNKED, WHOLE = 16, 256
"""Tokens of a step."""
SERVED: list[tuple[Family, int, int, bool]] = [
    ("llama", 2, CHUNKED, False),
    ("llama", 4, WHOLE, True),
    ("mistral", 2, WHOLE, True),
    ("mistral", 1, CHUNKED, False),
    ("qwen2", 2, CHUNKED, True),
    ("qwen2", 1, WHOLE, False),
    ("qwen3", 2, WHOLE, False),
    ("qwen3", 1, CHUNKED, True),
    ("gemma3", 4, CHUNKED, False),
    ("gemma3", 1, WHOLE, True),
    ("qwen3_moe", 2, CHUNKED, True),
]


@pytest.mark.parametrize(("family", "tp", "budget", "overlap"), SERVED)
def test_every_request_in_a_mixed_batch_and_alone_behind_kept_pages(
    references: dict[Family, Reference], family: Family, tp: int, budget: int, overlap: bool
) -> None:
    reference = references[family]
    requests = _requests(reference.expected)
    with Instance(_config(reference, tp, budget, overlap)) as instance:
        mixed = instance.generate(requests)
        alone = [instance.generate([request])[0] for request in requests]
        states = instance.inspect()
    for state in states:
        assert state.requests == ()
        assert state.pages_used == state.kv_host.pages_used == 0
        assert all(not slot.holders for slot in state.slots)
        assert state.checks == states[0].checks
    for i, expected in enumerate(reference.expected):
        what = f"{family} tp {tp} request {i} ({MODELS[i] or 'base'})"
        _check(alone[i], expected, f"{what} alone")
        _check(mixed[i], expected, f"{what} in the mixed batch")
        cached = (len(expected.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        assert (mixed[i].tokens[0].cached, alone[i].tokens[0].cached) == (0, cached), what


def test_every_family_is_served() -> None:
    assert {family for family, *_ in SERVED} == {*FAMILIES, "qwen3_moe"}
