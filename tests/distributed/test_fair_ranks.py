"""Real ranks give adapters tokens by their weights, whatever was asked for first; counted in tokens
and steps, never in seconds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support.instance import Instance

from mstar_tp.config import build_config
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

PROMPT, OUTPUT, EACH, ROWS = 6, 6, 24, 4


def test_real_ranks_give_adapters_tokens_by_their_weights(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", "llama", seed=7)
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, tmp_path / "model", rank=4, seed=seed)
    engine = {
        "model": str(tmp_path / "model"),
        "tensor_parallel_size": 2,
        "threads": 1,
        "max_model_len": 64,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "scheduling_policy": "fair",
        "lora": {
            "adapters": {name: str(tmp_path / name) for name in "ab"},
            "max_loras": 2,
            "limits": {"a": {"weight": 3, "pinned": True}},
        },
    }
    light, heavy = AdapterKey("b", FIRST_GENERATION), AdapterKey("a", FIRST_GENERATION)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0)
    with Instance(build_config({"engine": engine}, source="test")) as instance:
        instance.generate([(range(4), SamplingParams(max_tokens=1), k) for k in (light, heavy)])
        # All of the light one's come first.
        asked = [light] * EACH + [heavy] * EACH
        answers = instance.generate([(range(5, 5 + PROMPT), params, key) for key in asked])
        assert instance.inspect(0)[0].shares == ()
    assert all(len(answer.tokens) == OUTPUT for answer in answers)
    started = {
        key: [a.steps[0] for a, k in zip(answers, asked, strict=True) if k is key]
        for key in (light, heavy)
    }
    last = max(started[heavy])
    given = {
        key: sum(
            PROMPT + sum(step <= last for step in answer.steps)
            for answer, k in zip(answers, asked, strict=True)
            if k is key and answer.steps[0] <= last
        )
        for key in (light, heavy)
    }
    assert given[heavy] > EACH * PROMPT
    # Off by what the rows of one moment are given before it counts, and by those that joined before
    # the others had come.
    assert abs(given[heavy] / 3 - given[light]) <= 2 * ROWS * (PROMPT + OUTPUT) / 2
    assert given[heavy] > 2 * given[light]
