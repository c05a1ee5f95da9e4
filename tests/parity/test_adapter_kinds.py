"""Promise: every kind of adapter that is accepted gives the logits of transformers + PEFT.

Float32, the real engine on ranks as threads, one file a kind as PEFT saves it. Requests on all
kinds run in one batch, with base rows between them, in steps that mix chunks of prompts and single
tokens. 1e-4 of the largest logit is a hundred times what another order of float32 sums makes here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from support.peft_kit import TOKENS, TOLERANCE, Case, check_rows, expect, prompt, tune

from mstar_tp.testing.tiny_models import TARGETS, Family, make_tiny_model


@dataclass(frozen=True)
class Kind:
    """PEFT's settings of one adapter; ``only`` are the families it makes sense for."""

    settings: dict[str, Any]
    only: tuple[Family, ...] = ("llama", "qwen2", "gemma3")


LINEARS: dict[str, Any] = {"target_modules": list(TARGETS)}
ENDS: dict[str, Any] = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
KINDS: dict[str, Kind] = {
    "linears": Kind({**LINEARS, "r": 3, "lora_alpha": 5}),
    "rslora": Kind({**LINEARS, "r": 4, "use_rslora": True}),
    "all-linear": Kind({"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "regex": Kind({"target_modules": r".*layers\.1\..*(q|down)_proj"}),
    "patterns": Kind(
        {
            **LINEARS,
            "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\..*": 2},
            "alpha_pattern": {"model.layers.0.self_attn.q_proj": 3, "down_proj": 11},
        }
    ),
    "one layer": Kind({**LINEARS, "layers_to_transform": [1]}),
    "bias": Kind({**LINEARS, "lora_bias": True}),
    "embedding": Kind({"target_modules": ["embed_tokens", "v_proj"], "r": 5}),
    "head": Kind({"target_modules": ["lm_head", "v_proj"], "r": 5}),
    "head bias": Kind({"target_modules": ["lm_head"], "lora_bias": True}),
    "both ends": Kind({**ENDS, "rank_pattern": {"lm_head": 3}, "alpha_pattern": {"lm_head": 9}}),
    "tied ends": Kind(
        {
            "target_modules": ["embed_tokens", "q_proj"],
            "ensure_weight_tying": True,
            "alpha_pattern": {"lm_head": 3},
        },
        only=("qwen2", "gemma3"),
    ),
    "tokens": Kind({**LINEARS, "trainable_token_indices": list(TOKENS)}),
    "tokens of both": Kind(
        {**LINEARS, "trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [199, 5, 0]}}
    ),
    "tokens of the head": Kind({**LINEARS, "trainable_token_indices": {"lm_head": list(TOKENS)}}),
    "saved ends": Kind({**LINEARS, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved embedding": Kind({**LINEARS, "modules_to_save": ["embed_tokens"]}),
    "saved tied": Kind(
        {**LINEARS, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        only=("qwen2", "gemma3"),
    ),
    "saved norms": Kind({**LINEARS, "modules_to_save": ["norm"]}),
    "saved norms of one kind": Kind(
        {"target_modules": ["q_proj"], "modules_to_save": ["layers.1.input_layernorm", "lm_head"]}
    ),
    "saved head": Kind({"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
}


class Tuned(NamedTuple):
    """A base model, its adapters' folders, and what PEFT answers on them."""

    path: Path
    base: Any
    folders: dict[str, Path]
    cases: list[Case]


def _save(folder: Path, base: Any, kind: Kind, seed: int) -> None:
    import peft

    settings = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **kind.settings}
    tuned = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    tune(tuned, seed)
    tuned.save_pretrained(str(folder))


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    torch.set_num_threads(1)
    name: Family = request.param
    folder = tmp_path_factory.mktemp(name)
    path = make_tiny_model(folder / "base", name, seed=3)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cases = [Case(None, prompt(9))]
    folders = {}
    for seed, (kind_name, kind) in enumerate(KINDS.items()):
        if name not in kind.only:
            continue
        folders[kind_name] = folder / kind_name
        _save(folders[kind_name], base, kind, seed)
        cases.append(Case(kind_name, prompt(8 + seed % 5)))
    cases.append(Case(None, prompt(12)))
    for case in cases:
        expect(case, base, folders.get(case.name or ""))
    return Tuned(path, base, folders, cases)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_accepted_kind_gives_pefts_logits(family: Tuned, world_size: int) -> None:
    check_rows(family.cases, family.path, family.folders, world_size)


def test_every_kind_changes_the_logits(
    family: Tuned,
) -> None:
    """Else a kind that is served as the base would pass."""
    for case in family.cases:
        plain = Case(None, case.prompt)
        expect(plain, family.base, None)
        far = float((plain.logits[0] - case.logits[0]).abs().max() / plain.logits[0].abs().max())
        assert (far > 100 * TOLERANCE) == (case.name is not None), (case.name, far)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_what_peft_converts_to_plain_lora_is_what_was_trained(
    llama: Path, tmp_path: Path, init: str
) -> None:
    """The reference is the model in training, whose base weights the initialisation changed."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=init, **LINEARS)
    tuned = peft.get_peft_model(base, config)
    config.init_lora_weights = True
    tuned.save_pretrained(str(tmp_path / "initial"))
    config.init_lora_weights = init
    tune(tuned, seed=1)
    initial = str(tmp_path / "initial")
    tuned.save_pretrained(str(tmp_path / "out"), path_initial_model_for_weight_conversion=initial)
    case = Case("x", prompt(11))
    expect(case, tuned, None)
    for world_size in (1, 2):
        check_rows([case], llama, {"x": tmp_path / "out"}, world_size)


def test_an_adapter_of_a_fused_model_serves_on_the_same_model_in_parts(
    llama: Path, tmp_path: Path
) -> None:
    """Phi-3 is Llama with fused projections: given Llama's weights it computes the same."""
    import peft

    split = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    settings = {key: getattr(split.config, key) for key in (*shared, *heads, "rms_norm_eps")}
    fused = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **settings,
            rope_parameters=split.config.rope_parameters,
            sliding_window=None,
            pad_token_id=0,
            attn_implementation="eager",
        )
    )
    weights = split.state_dict()
    for layer in range(split.config.num_hidden_layers):
        stem = f"model.layers.{layer}"
        for parent, name, parts in (
            ("self_attn", "qkv", "qkv"),
            ("mlp", "gate_up", ("gate", "up")),
        ):
            rows = [weights.pop(f"{stem}.{parent}.{part}_proj.weight") for part in parts]
            weights[f"{stem}.{parent}.{name}_proj.weight"] = torch.cat(rows)
    fused.load_state_dict(weights)
    same = Case(None, prompt(11))
    expect(same, fused, None)
    modules = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=modules)
    tuned = peft.get_peft_model(fused, config)
    tune(tuned, seed=1)
    tuned.save_pretrained(str(tmp_path / "x"))
    case = Case("x", prompt(11))
    expect(case, tuned, None)
    for world_size in (1, 2):
        check_rows([same, case], llama, {"x": tmp_path / "x"}, world_size)
