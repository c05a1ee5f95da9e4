"""Promise: adapters on the head are exact whatever rows of a step sample: prompts in chunks beside
decoding rows, several answers to one prompt (``n``), some of which want their prompt's log
probabilities (``echo``), each on another adapter, in one batch.

The head sees the sampled and the scored rows only, so its rows are others than every other
linear's in each step.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.lockstep_ranks import LockstepRanks
from support.peft_kit import (
    TOKENS,
    VOCAB,
    assert_close,
    engine_config,
    logits_of,
    logits_told,
    prompt,
    tune,
)

from mstar_tp.testing.tiny_models import make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

HEADS: dict[str, dict[str, Any]] = {
    "factors": {"target_modules": ["lm_head", "v_proj"], "r": 5},
    "bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "whole": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": list(TOKENS)}},
    "none": {"target_modules": ["q_proj", "down_proj"]},
}
NUM_ANSWERS = 2
NUM_TOKENS = 4


class Answer(NamedTuple):
    name: str | None
    rid: int
    prompt: list[int]
    chunk: int
    tokens: list[int]
    logits: list[torch.Tensor]
    of_prompt: list[torch.Tensor]

    @property
    def num_next(self) -> int:
        """The most tokens that its next step computes."""
        return 1 if self.tokens else self.chunk


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], Any]:
    import peft
    import transformers

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("heads")
    path = make_tiny_model(folder / "base", "llama", seed=5)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    folders = {}
    for seed, (name, settings) in enumerate(HEADS.items()):
        config = peft.LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", **settings})
        trained = peft.get_peft_model(copy.deepcopy(base), config)
        tune(trained, seed)
        folders[name] = folder / name
        trained.save_pretrained(str(folders[name]))
    return path, folders, base


@pytest.mark.parametrize("world_size", [1, 2])
def test_sampled_rows_take_their_own_adapters_head(
    tuned: tuple[Path, dict[str, Path], Any], world_size: int
) -> None:
    import peft

    path, folders, base = tuned
    ranks = LockstepRanks(engine_config(path, folders, world_size))
    try:
        answers = _run(ranks, [None, *folders])
    finally:
        ranks.close()
    # Several answers of one prompt part, or the rows would not be told apart.
    assert len({tuple(answer.tokens) for answer in answers}) > len(folders) + 1
    for name in (None, *folders):
        model = copy.deepcopy(base)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, str(folders[name]))
        for answer in (a for a in answers if a.name == name):
            with torch.no_grad():
                wanted = model.eval()(torch.tensor([answer.prompt + answer.tokens])).logits[0]
            for position, logits in enumerate(answer.logits):
                at = len(answer.prompt) - 1 + position
                assert_close(logits, wanted[at], f"{name}, token {position}")
            assert len(answer.of_prompt) in (0, len(answer.prompt) - 1)
            for at, logits in enumerate(answer.of_prompt):
                assert_close(logits, wanted[at], f"{name}, prompt token {at + 1}")
    assert sum(bool(answer.of_prompt) for answer in answers) == len(folders) + 1


def _run(ranks: LockstepRanks, names: list[str | None]) -> list[Answer]:
    """Every prompt answered ``NUM_ANSWERS`` times, in one batch of chunks of unlike sizes."""
    answers: list[Answer] = []
    for number, name in enumerate(names):
        key = None if name is None else AdapterKey(name, FIRST_GENERATION)
        for again in range(NUM_ANSWERS):
            params = SamplingParams(
                max_tokens=NUM_TOKENS,
                seed=10 * number + again,
                logprobs=VOCAB,
                prompt_logprobs=VOCAB if again else None,
            )
            asked = prompt(7 + number)
            rid = ranks.open(asked, params, key)
            assert key is None or ranks.wait_copies(rid) is None
            answers.append(Answer(name, rid, asked, 2 + (number + again) % 4, [], [], []))
    done = dict.fromkeys((answer.rid for answer in answers), 0)
    mixed = 0
    while any(len(answer.logits) < NUM_TOKENS for answer in answers):
        left = [answer for answer in answers if len(answer.logits) < NUM_TOKENS]
        rows = []
        for answer in left if mixed % 2 else reversed(left):
            total = len(answer.prompt) + len(answer.tokens)
            rows.append((answer.rid, min(answer.num_next, total - done[answer.rid])))
            done[answer.rid] += rows[-1][1]
        result = ranks.step(rows)[0]
        assert not result.failed
        mixed += 0 < len(result.sampled) < len(rows)
        for answer in left:
            if answer.rid in result.sampled:
                sampled = result.sampled[answer.rid]
                answer.tokens.append(sampled.token)
                answer.logits.append(logits_of(sampled))
                answer.of_prompt.extend(map(logits_told, sampled.prompt_logprobs))
    assert mixed > 2, "chunks and sampling rows never shared a step"
    return answers
