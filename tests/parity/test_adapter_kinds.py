"""Promise: every kind of adapter that is accepted gives the logits of transformers + PEFT.

Float32, the real engine on ranks as threads, one file a kind as PEFT saves it. Requests on all
kinds run in one batch, with base rows between them, in steps that mix chunks of prompts and single
tokens. 1e-4 of the largest logit is a hundred times what another order of float32 sums makes here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.lockstep import LockstepRanks
from mstar_tp.testing.tiny_models import TARGETS, Family, make_tiny_model
from mstar_tp.wire.messages import FIRST_GENERATION, AdapterKey, SamplingParams

VOCAB = 211
TOLERANCE = 1e-4
NUM_DECODED = 3
PARAMS = SamplingParams(max_tokens=NUM_DECODED + 1, temperature=0, logprobs=1 << 20)
TOKENS = (0, 7, 106, 107, 199, 210)
"""Ids on both ranks of two, at the edges of their parts."""


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
    "saved head": Kind({"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
}


@dataclass
class Case:
    """One row: its adapter, its prompt, the tokens fed after it and the logits after each."""

    name: str | None
    prompt: list[int]
    fed: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Tuned(NamedTuple):
    """A base model, its adapters' folders, and what PEFT answers on them."""

    path: Path
    base: Any
    folders: dict[str, Path]
    cases: list[Case]


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return [*TOKENS, *drawn][:length]


def _tune(model: Any, seed: int) -> None:
    """Whatever the adapter trains gets values that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        trains = ("lora_", "trainable_tokens_delta", "modules_to_save")
        if not any(part in name for part in trains):
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        size = 0.3 * float(parameter.detach().std()) if "lora_" not in name else 0.1
        with torch.no_grad():
            parameter.add_(noise * max(size, 0.01))


def _save(folder: Path, base: Any, kind: Kind, seed: int) -> None:
    import peft

    settings = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **kind.settings}
    tuned = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    _tune(tuned, seed)
    tuned.save_pretrained(str(folder))


def _expect(case: Case, base: Any, folder: Path | None) -> None:
    """What transformers + PEFT answer, from the adapter's file."""
    import peft

    model = copy.deepcopy(base)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, str(folder))
    model.eval()
    with torch.no_grad():
        for _ in range(NUM_DECODED):
            logits = model(torch.tensor([[*case.prompt, *case.fed]])).logits[0, -1]
            case.logits.append(logits)
            case.fed.append(int(logits.argmax()))


def check_rows(cases: list[Case], base: Path, folders: dict[str, Path], world_size: int) -> None:
    """Run the cases in one batch on ``world_size`` ranks and compare every row's logits."""
    config = EngineConfig(
        model=str(base),
        tensor_parallel_size=world_size,
        dtype="float32",
        threads=1,
        max_model_len=64,
        block_size=4,
        lora=LoraConfig(
            adapters={name: str(folder) for name, folder in folders.items()},
            max_loras=len(folders),
            max_lora_rank=8,
            max_lora_saved_rows=VOCAB,
        ),
    )
    ranks = LockstepRanks(config)
    try:
        rids = []
        for case in cases:
            key = None if case.name is None else AdapterKey(case.name, FIRST_GENERATION)
            rids.append(ranks.open(case.prompt, PARAMS, key))
            assert key is None or ranks.wait_copies(rids[-1]) is None
        # Half of the prompts whole, the others in two chunks; then one token a row.
        first = [len(c.prompt) if i % 2 else len(c.prompt) // 2 for i, c in enumerate(cases)]
        steps = [[(rid, n) for rid, n in zip(rids, first, strict=True)]]
        rest = [len(c.prompt) - n or 1 for c, n in zip(cases, first, strict=True)]
        steps.append([(rid, n) for rid, n in zip(rids, rest, strict=True)])
        steps += [[(rid, 1) for rid in reversed(rids)]] * (NUM_DECODED - 1)
        seen: dict[int, list[torch.Tensor]] = {rid: [] for rid in rids}
        for rows in steps:
            result = ranks.step(rows)[0]
            assert not result.failed, result.failed
            for rid, sampled in result.sampled.items():
                assert sampled.logprobs is not None
                logits = torch.empty(VOCAB)
                logits[list(sampled.logprobs.top_ids)] = torch.tensor(sampled.logprobs.top)
                seen[rid].append(logits)
    finally:
        ranks.close()
    for rid, case in zip(rids, cases, strict=True):
        for position, wanted in enumerate(case.logits):
            got = seen[rid][position]
            worst = float((got - wanted).abs().max() / wanted.abs().max())
            assert worst < TOLERANCE, f"{case.name}, token {position}: off by {worst:.2e}"


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    torch.set_num_threads(1)
    name: Family = request.param
    folder = tmp_path_factory.mktemp(name)
    path = make_tiny_model(folder / "base", name, seed=3)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cases = [Case(None, _prompt(9))]
    folders = {}
    for seed, (kind_name, kind) in enumerate(KINDS.items()):
        if name not in kind.only:
            continue
        folders[kind_name] = folder / kind_name
        _save(folders[kind_name], base, kind, seed)
        cases.append(Case(kind_name, _prompt(8 + seed % 5)))
    cases.append(Case(None, _prompt(12)))
    for case in cases:
        _expect(case, base, folders.get(case.name or ""))
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
        _expect(plain, family.base, None)
        far = float((plain.logits[0] - case.logits[0]).abs().max() / plain.logits[0].abs().max())
        assert (far > 100 * TOLERANCE) == (case.name is not None), (case.name, far)
