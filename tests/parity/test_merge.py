"""Promise: a merged model is, bit for bit, what PEFT's merge_and_unload makes of base and adapter
in float32, and it computes what the adapter computes on the base.

Where head and embedding are tied and an adapter changes one of them, PEFT's merge changes both and
computes something else than its own adapter: there the adapter's logits are the reference.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import Phase, given, reject, settings
from safetensors.torch import load_file, save_file
from support.merge_kit import merged
from support.peft_kit import Case, assert_close, check_rows, expect, prompt, tune
from test_adapter_configs import configs

from mstar_tp.common.errors import AdapterError
from mstar_tp.testing.tiny_models import TARGETS, Family, make_tiny_model
from mstar_tp.tools.merge import apply

IDS = torch.tensor([prompt(12)])
ENDS = {"model.embed_tokens.weight", "lm_head.weight"}
ADDING_BIAS = "has no bias that this one could be added to"


def load(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits[0]


def adapter(base: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    import peft

    whole = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": list(TARGETS)}
    tuned = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**{**whole, **config}))
    tune(tuned, seed)
    tuned.save_pretrained(str(folder))
    return folder


@dataclass(repr=False)
class Base:
    path: Path
    model: Any
    folder: Path
    adapters: int = 0


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Base]:
    torch.set_num_threads(1)
    name: Family = request.param
    folder = tmp_path_factory.mktemp(name)
    path = make_tiny_model(folder / "base", name, seed=3, max_shard_size="100KB")
    yield Base(path, load(path), folder)


@settings(max_examples=8, phases=[Phase.generate], deadline=None)
@given(config=configs())
def test_a_merge_of_any_plain_lora_is_pefts(base: Base, config: dict[str, Any]) -> None:
    import peft

    base.adapters += 1
    folder = base.folder / f"x{base.adapters}"
    try:
        adapter(base.model, folder, base.adapters, **config)
        reread = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), str(folder)).eval()
    except (ValueError, TypeError, AttributeError, RuntimeError):
        reject()  # PEFT itself has no such adapter
    wanted = logits(reread)
    out = base.folder / f"merged{base.adapters}"
    try:
        merged(base.path, [folder], out, max_shard_bytes=90_000)
    except AdapterError as refusal:
        tied = "the head is tied to the embedding, whose trained tokens"
        assert tied in str(refusal) or ADDING_BIAS in str(refusal)
        assert not out.exists()
        return
    mine = load(out)
    assert_close(logits(mine), wanted, str(config))
    theirs = reread.merge_and_unload()
    same_ends = (logits(theirs) - wanted).abs().max() < 1e-3 * wanted.abs().max()
    tensors = mine.state_dict()
    for key, tensor in theirs.state_dict().items():
        if key not in ENDS or same_ends:
            assert torch.equal(tensors[key], tensor), (key, config)
    assert not same_ends or mine.config.tie_word_embeddings == theirs.config.tie_word_embeddings


def test_several_adapters_add_up_by_their_weights(base: Base) -> None:
    """Against sums in float64, of a bfloat16 base too, which is rounded once."""
    saved = {"modules_to_save": ["input_layernorm"]}
    folders = [
        adapter(base.model, base.folder / "one", 1, use_rslora=True, **saved),
        adapter(base.model, base.folder / "two", 2, r=5, target_modules=["q_proj", "down_proj"]),
    ]
    weights = [0.75, -0.5]
    low = base.folder / "low"
    copy.deepcopy(base.model).to(torch.bfloat16).save_pretrained(low, max_shard_size="40KB")
    for path, dtype in ((base.path, torch.float32), (low, torch.bfloat16)):
        out = merged(path, folders, base.folder / f"sum-{dtype}", weights, max_shard_bytes=50_000)
        before, after = load(path).state_dict(), load(out).state_dict()
        wanted = {key: tensor.double() for key, tensor in before.items()}
        for folder, weight in zip(folders, weights, strict=True):
            scaling = 5 / 3**0.5 if folder.name == "one" else 1.0
            tensors = load_file(folder / "adapter_model.safetensors")
            for key, a in tensors.items():
                name = key.removeprefix("base_model.model.")
                if "lora_A" in key:
                    b = tensors[key.replace("lora_A", "lora_B")].double()
                    name = name.replace(".lora_A", "")
                    wanted[name] += weight * scaling * (b @ a.double())
                elif "lora" not in key:
                    wanted[name] += weight * (a.double() - before[name].double())
        for key, tensor in wanted.items():
            close = torch.tensor(2.0**-8 if dtype == torch.bfloat16 else 2e-6)
            far = (after[key].double() - tensor).abs()
            assert (far <= close * tensor.abs() + 1e-7).all(), key
            if dtype == torch.bfloat16:
                # A sum within float32's error of a rounding boundary may go either way.
                off = (after[key] != tensor.to(dtype)).float().mean()
                assert off < 0.01, (key, off)


def test_a_tensor_is_merged_by_parts_as_it_is_whole(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [
        adapter(
            base.model,
            base.folder / "ends",
            5,
            target_modules=["embed_tokens", "lm_head", "k_proj"],
        ),
        adapter(base.model, base.folder / "rows", 6, trainable_token_indices=[0, 7, 106, 210]),
    ]
    whole = load(merged(base.path, folders, base.folder / "whole")).state_dict()
    monkeypatch.setattr(apply, "PART_ELEMENTS", 700)
    parts = load(merged(base.path, folders, base.folder / "parts")).state_dict()
    for key, tensor in whole.items():
        assert (parts[key] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), key


def test_the_server_says_the_same_with_the_adapter_and_with_the_merged_model(base: Base) -> None:
    config = {"target_modules": [*TARGETS, "embed_tokens"], "rank_pattern": {"q_proj": 5}}
    folder = adapter(base.model, base.folder / "served", 4, **config)
    out = merged(base.path, [folder], base.folder / "served-merged", dtype="float32")
    with_adapter = Case("x", prompt(9))
    expect(with_adapter, base.model, folder)
    alone = Case(None, prompt(9), with_adapter.fed, with_adapter.logits)
    check_rows([with_adapter], base.path, {"x": folder}, 2)
    check_rows([alone], out, {"x": folder}, 2)


def test_a_head_takes_over_the_factors_that_its_file_leaves_to_the_embedding(
    tmp_path: Path,
) -> None:
    """A tied head, PEFT's ensure_weight_tying, and no factors of the head in the file."""
    path = make_tiny_model(tmp_path / "base", "qwen2", seed=3)
    model = load(path)
    config = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    folder = adapter(model, tmp_path / "x", **config)
    weights = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "lm_head" not in k}, weights)
    case = Case("x", prompt(9))
    expect(case, model, folder)
    check_rows([case], path, {"x": folder}, 2)
    out = merged(path, [folder], tmp_path / "out")
    alone = Case(None, prompt(9), case.fed, case.logits)
    check_rows([alone], out, {"x": folder}, 1)
    # Both changed alike, so they are still one weight.
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
