"""Promise: adapters on attention, router and experts of mixture-of-experts models give the logits
of transformers + PEFT, in the keys of published adapters (a linear for each of an expert's three)
and in those of stacked experts (``target_parameters``).

Float32, the real engine on ranks as threads. The reference of a published adapter is PEFT on a
model with linear experts; of a stacked one, PEFT on the model as transformers has it today. All
kinds run in one batch, base rows between them.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.merge_kit import merged
from support.moe_kit import Names, names_of, with_linear_experts
from support.peft_kit import TOLERANCE, Case, assert_close, check_rows, expect, prompt, tune

from mstar_tp.testing.lora_files import write_adapter
from mstar_tp.testing.tiny_models import MOE_FAMILIES, make_tiny_model
from mstar_tp.tools.merge.merge_command import MergeOptions, merge


@dataclass(frozen=True)
class Kind:
    """PEFT's settings of one adapter, where GATE, UP and DOWN stand for an expert's linears."""

    settings: dict[str, Any]
    stacked: bool = False


EXPERTS: dict[str, Any] = {"target_modules": ["GATE", "UP", "DOWN"]}
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, Kind] = {
    "attention": Kind({"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 3}),
    "experts": Kind({**EXPERTS, "r": 3, "lora_alpha": 5}),
    "router": Kind({"target_modules": ["gate"], "r": 2}),
    "everything": Kind({"target_modules": "all-linear", "use_rslora": True}),
    "some experts": Kind({"target_modules": r".*layers\.0\..*experts\.[13]\.(GATE|DOWN)"}),
    "patterns": Kind(
        {
            **EXPERTS,
            "rank_pattern": {r"experts\.1\.DOWN": 5, r"layers\.1\.BLOCK\..*": 1},
            "alpha_pattern": {"layers.0.BLOCK.experts.2.UP": 3, "DOWN": 11},
        }
    ),
    "bias": Kind({"target_modules": ["GATE", "UP", "DOWN", "q_proj"], "lora_bias": True}),
    "stacked": Kind({"target_modules": [], "target_parameters": STACKED}, stacked=True),
    "stacked down": Kind(
        {"target_modules": ["q_proj"], "target_parameters": [STACKED[1]], "r": 3}, stacked=True
    ),
    "stacked gate and up": Kind(
        {
            "target_modules": [],
            "target_parameters": ["layers.1.mlp.experts.gate_up_proj", "gate.weight"],
            "use_rslora": True,
            "rank_pattern": {"gate_up_proj": 4},
            "alpha_pattern": {"gate.weight": 7},
        },
        stacked=True,
    ),
    "converted by peft": Kind(
        {"target_modules": ["k_proj", "gate", "GATE", "UP", "DOWN"]}, stacked=True
    ),
}


def _spelled(value: Any, names: Names) -> Any:
    if isinstance(value, dict):
        return {_spelled(k, names): _spelled(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [_spelled(entry, names) for entry in value]
    if isinstance(value, str):
        for word, name in zip(("BLOCK", "GATE", "UP", "DOWN"), names, strict=True):
            value = value.replace(word, name)
    return value


class Tuned(NamedTuple):
    """A base model in both its shapes, its adapters' folders, and what PEFT answers on them."""

    path: Path
    base: Any
    linear: Any
    folders: dict[str, Path]
    cases: list[Case]


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    import peft

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    path = make_tiny_model(folder / "base", request.param, seed=3)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    linear = with_linear_experts(base)
    folders = {name: folder / name for name in KINDS}
    cases = [Case(None, prompt(9))]
    for seed, (name, kind) in enumerate(KINDS.items()):
        model = base if kind.stacked else linear
        settings = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **kind.settings}
        config = peft.LoraConfig(**_spelled(settings, names_of(base)))
        tuned = peft.get_peft_model(copy.deepcopy(model), config)
        tune(tuned, seed)
        tuned.save_pretrained(str(folders[name]))
        cases.append(Case(name, prompt(8 + seed % 5)))
        expect(cases[-1], model, folders[name])
    cases.append(Case(None, prompt(12)))
    for case in (cases[0], cases[-1]):
        expect(case, base, None)
    return Tuned(path, base, linear, folders, cases)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_accepted_kind_gives_pefts_logits(family: Tuned, world_size: int) -> None:
    check_rows(family.cases, family.path, family.folders, world_size)


def test_every_kind_changes_the_logits(family: Tuned) -> None:
    """Else a kind that is served as the base would pass."""
    for case in family.cases:
        plain = Case(None, case.prompt)
        expect(plain, family.base, None)
        far = float((plain.logits[0] - case.logits[0]).abs().max() / plain.logits[0].abs().max())
        assert (far > 100 * TOLERANCE) == (case.name is not None), (case.name, far)


@pytest.mark.parametrize("layout", ["a linear each", "stacked"])
def test_merged_experts_say_what_the_adapter_says(
    family: Tuned, tmp_path: Path, layout: str
) -> None:
    """Adapters of both kinds, merged into base models of both kinds."""
    path = family.path
    if layout == "stacked":
        path = tmp_path / "base"
        shutil.copytree(family.path, path)
        weights = {key: t.clone() for key, t in family.base.state_dict().items()}
        save_file(weights, path / "model.safetensors")
    for case in family.cases:
        if case.name not in ("everything", "patterns", "stacked", "stacked gate and up"):
            continue
        out = merged(path, [family.folders[case.name]], tmp_path / case.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.no_grad():
            got = model.eval()(torch.tensor([case.prompt])).logits[0, -1]
        assert_close(got, case.logits[0], f"{case.name} on {layout}")


def test_peft_takes_a_published_adapter_for_what_it_is_here(family: Tuned) -> None:
    """It stacks the factors of an expert's linears when it loads them."""
    case = next(case for case in family.cases if case.name == "experts")
    again = Case("experts", case.prompt)
    expect(again, family.base, family.folders["experts"])
    for got, wanted in zip(again.logits, case.logits, strict=True):
        assert_close(got, wanted, "PEFT on stacked experts")


@pytest.mark.parametrize("kind", ["everything", "converted by peft"])
def test_a_merged_model_is_what_the_adapter_makes_of_the_base(
    family: Tuned, tmp_path: Path, kind: str
) -> None:
    merge(
        MergeOptions(
            model=family.path,
            adapters=(family.folders[kind],),
            weights=(1.0,),
            out=tmp_path / "out",
            dtype=None,
            max_shard_bytes=1 << 40,
            force=False,
        )
    )
    case = next(case for case in family.cases if case.name == kind)
    merged = Case(None, case.prompt)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expect(merged, model, None)
    for got, wanted in zip(merged.logits, case.logits, strict=True):
        assert_close(got, wanted, f"merged {kind}")


def test_factors_of_stacked_experts_are_expert_major_in_a_and_expert_minor_in_b(
    tmp_path: Path,
) -> None:
    """By hand: expert e of E has rows e * r + k of A and columns k * E + e of B."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 32, "hidden_size": 8, "head_dim": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    path = make_tiny_model(tmp_path / "base", "qwen3_moe", **sizes, **experts)
    count, rank, scale = 3, 2, 2.0
    tensors = {}
    stem = "base_model.model.model.layers.{}.mlp.experts"
    for layer in (0, 1):
        for inner, size_in, size_out in (("base_layer.", 8, 12), ("", 6, 8)):
            a = torch.arange(count * rank * size_in).view(-1, size_in) / 100.0
            b = torch.arange(size_out * rank * count).view(size_out, -1) / 100.0
            tensors[f"{stem.format(layer)}.{inner}lora_A.weight"] = a
            tensors[f"{stem.format(layer)}.{inner}lora_B.weight"] = b
    folder = write_adapter(
        tmp_path / "a", tensors, target_modules=[], target_parameters=STACKED, lora_alpha=4
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    case, plain = Case("a", [1, 5, 9, 2]), Case(None, [1, 5, 9, 2])
    expect(plain, base, None)
    for layer in (0, 1):
        weights = base.model.layers[layer].mlp.experts
        for inner, weight in (("base_layer.", weights.gate_up_proj), ("", weights.down_proj)):
            a, b = (tensors[f"{stem.format(layer)}.{inner}lora_{half}.weight"] for half in "AB")
            for e in range(count):
                for k in range(rank):
                    weight.data[e] += scale * torch.outer(b[:, k * count + e], a[e * rank + k])
    expect(case, base, None)
    for world_size in (1, 2):
        check_rows([case, plain], path, {"a": folder}, world_size)
