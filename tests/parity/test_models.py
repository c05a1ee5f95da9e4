"""Promise: every family's logits are transformers' own, however a text is cut into steps.

Float32 on both sides, random weights that make every part matter; 1e-4 relative is a hundred times
the difference that another order of float32 sums makes at these sizes, and far below what any
dropped or misplaced part would change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.paged_runner import PagedRunner

from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import load_model
from mstar_tp.testing.tiny_models import FAMILIES, MOE_FAMILIES, Family, make_tiny_model

torch.set_num_threads(1)

PROMPT_LENGTH, NUM_NEW = 21, 6
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: list[tuple[str, Family, dict[str, Any]]] = [
    *((family, family, {}) for family in (*FAMILIES, *MOE_FAMILIES)),
    (
        "qwen3_moe-some-layers",
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    ("qwen3_moe-window", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen3_moe-one-expert", "qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("mixtral-all-experts", "mixtral", {"num_experts_per_tok": 5, "sliding_window": None}),
    ("llama-llama3", "llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    ("llama-linear", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    ("llama-yarn", "llama", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    (
        "llama-yarn-mscale",
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False}},
    ),
    ("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-head-dim", "llama", {"head_dim": 24}),
    ("llama-mha", "llama", {"num_key_value_heads": 4}),
    ("mistral-no-window", "mistral", {"sliding_window": None}),
    ("qwen2-untied-full", "qwen2", {"tie_word_embeddings": False, "use_sliding_window": False}),
    ("qwen3-biases", "qwen3", {"attention_bias": True}),
    (
        "gemma3-scaled",
        "gemma3",
        {
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = load_model_config(folder)
    return load_model(folder, config, SingleGroup(), dtype, torch.device("cpu"))


def reference(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def some_tokens(seed: int, count: int = PROMPT_LENGTH + NUM_NEW) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 211, (count,), generator=generator).tolist()


def assert_close(got: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert got is not None
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "overrides"), [(f, o) for _, f, o in VARIANTS], ids=[name for name, _, _ in VARIANTS]
)
def test_logits_match_transformers_whole_chunked_and_decoding(
    tmp_path: Path, family: Family, overrides: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path, family, 3, **overrides)
    tokens = some_tokens(5)
    wanted = reference(tmp_path, tokens)
    runner = PagedRunner(load(tmp_path))
    assert_close(runner.prefill("whole", tokens), wanted)
    for chunk in (4, 7):
        prompt = tokens[:PROMPT_LENGTH]
        assert_close(runner.prefill(f"by {chunk}", prompt, chunk), wanted[:PROMPT_LENGTH])
    decoded = [runner.prefill(f"by {chunk}", [token]) for token in tokens[PROMPT_LENGTH:]]
    assert_close(torch.cat([part for part in decoded if part is not None]), wanted[PROMPT_LENGTH:])


@pytest.mark.parametrize("family", (*FAMILIES, *MOE_FAMILIES))
def test_rows_of_a_mixed_step_are_what_they_are_alone(tmp_path: Path, family: Family) -> None:
    make_tiny_model(tmp_path, family, 4)
    texts = {name: some_tokens(seed, 12 + 5 * seed) for seed, name in enumerate("abcd")}
    wanted = {name: reference(tmp_path, tokens) for name, tokens in texts.items()}
    runner = PagedRunner(load(tmp_path))
    for name in "ab":
        runner.prefill(name, texts[name][:9])
    for name in "c":
        runner.prefill(name, texts[name][:3])
    # Two decode rows, a chunk that continues and one that begins, in one step.
    rows = [("a", 9, 10), ("b", 9, 10), ("c", 3, 11), ("d", 0, 14)]
    got = runner.step([(name, texts[name][i:j]) for name, i, j in rows])
    assert got is not None
    for (name, i, j), logits in zip(rows, got, strict=True):
        assert_close(logits, wanted[name][i:j])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_in_the_old_spelling_gives_the_same_model(tmp_path: Path, family: Family) -> None:
    import json

    make_tiny_model(tmp_path, family, 3)
    tokens = some_tokens(6)
    wanted = PagedRunner(load(tmp_path)).prefill("new", tokens)
    path = tmp_path / "config.json"
    tree = json.loads(path.read_text())
    rope = tree.pop("rope_parameters")
    if family == "gemma3":
        tree["rope_theta"] = rope["full_attention"]["rope_theta"]
        tree["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    else:
        tree["rope_theta"] = rope["rope_theta"]
    tree["torch_dtype"] = tree.pop("dtype")
    path.write_text(json.dumps(tree))
    got = PagedRunner(load(tmp_path)).prefill("old", tokens)
    assert got is not None and wanted is not None and torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", (*FAMILIES, *MOE_FAMILIES))
def test_half_precision_rounds_about_as_transformers_does(
    tmp_path: Path, family: Family, dtype: torch.dtype
) -> None:
    """Both round in their own places: each must be as near the float32 truth as the other, within
    twice.
    """
    make_tiny_model(tmp_path, family, 3, dtype=dtype)
    tokens = some_tokens(7)
    truth = reference(tmp_path, tokens)
    theirs = reference(tmp_path, tokens, dtype).float()
    ours = PagedRunner(load(tmp_path, dtype)).prefill("a", tokens)
    assert ours is not None and ours.dtype == dtype
    error = (ours.float() - truth).norm() / truth.norm()
    assert error <= 2 * (theirs - truth).norm() / truth.norm()
