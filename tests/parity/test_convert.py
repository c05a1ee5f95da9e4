"""Promise: what `mstar-tp convert` writes, PEFT loads to the logits that the original file means.

For PEFT's own pickles these are PEFT's on the original; for Kohya's and diffusers' files they are
those of the base with alpha / rank times up @ down added to its weights by hand.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.peft_kit import TOKENS, assert_close, prompt, tune

from mstar_tp.cli.main import main
from mstar_tp.testing.tiny_models import TARGETS, make_tiny_model
from mstar_tp.tools.convert import convert_command
from mstar_tp.tools.convert.convert_command import ConvertOptions, convert

IDS = torch.tensor([prompt(12)])
KINDS: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"down_proj": 11}, "r": 7},
    "rslora and biases": {"use_rslora": True, "lora_bias": True},
    "tied ends": {
        "target_modules": ["embed_tokens", "q_proj"],
        "ensure_weight_tying": True,
        "alpha_pattern": {"lm_head": 3},
    },
    "tokens": {"trainable_token_indices": list(TOKENS)},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [5, 0]}},
    "saved": {"modules_to_save": ["norm", "lm_head"]},
}


class Base(NamedTuple):
    path: Path
    model: Any


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path_factory.mktemp("base"), "qwen2", seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Base(path, model.eval())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits[0]


def peft_logits(base: Base, folder: Path) -> torch.Tensor:
    import peft

    return logits(peft.PeftModel.from_pretrained(copy.deepcopy(base.model), str(folder)).eval())


def converted(source: Path, out: Path, model: Path | None) -> Path:
    convert(ConvertOptions(source=source, out=out, model=model, force=False))
    return out


def pickled(base: Base, folder: Path, seed: int, **config: Any) -> torch.Tensor:
    """A PEFT adapter as old PEFT wrote it; its logits."""
    import peft

    settings = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": list(TARGETS)}
    lora = peft.LoraConfig(**{**settings, **config})
    tuned = peft.get_peft_model(copy.deepcopy(base.model), lora)
    tune(tuned, seed)
    tuned.save_pretrained(str(folder))
    wanted = peft_logits(base, folder)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    return wanted


def here(source: Path, target: Path) -> None:
    """The reading process's work without the process: what it may do is tested elsewhere."""
    from mstar_tp.tools.convert.unpickler import read_tensors

    with open(source, "rb") as file:
        save_file(read_tensors(file, source.stat().st_size), target)


@pytest.mark.parametrize("named", KINDS)
def test_pefts_pickles_keep_their_logits(
    base: Base, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_command, "pickle_to_safetensors", here)
    wanted = pickled(base, tmp_path / "x", 1, **KINDS[named])
    kept = converted(tmp_path / "x", tmp_path / "kept", None)
    assert torch.equal(peft_logits(base, kept), wanted)
    rewritten = converted(tmp_path / "x", tmp_path / "rewritten", base.path)
    assert torch.equal(peft_logits(base, rewritten), wanted)


def test_a_pickle_is_converted_by_a_process_of_its_own(
    base: Base,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With keys as they were found in the wild, which take the model to read."""
    wanted = pickled(base, tmp_path / "x", 2)
    source = tmp_path / "x" / "adapter_model.bin"
    odd = {
        key.replace("base_model.model.", "module._orig_mod.").replace("lora_A", "lora_A.sql")
        .replace("lora_B", "lora_B.sql"): tensor
        for key, tensor in torch.load(source, weights_only=True).items()
    }  # fmt: skip
    torch.save({"state_dict": odd}, source)
    told = ["convert", str(source), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(convert_command, "pickle_to_safetensors", here)
        assert main(told) == 1
    said = capfd.readouterr().err
    assert "is a key that PEFT would not find: give --model DIR" in said
    assert str(tmp_path / "x") in said and "unfinished" not in said
    assert main([*told, "--model", str(base.path)]) == 0
    assert "14 modules of rank 3" in capfd.readouterr().out
    assert torch.equal(peft_logits(base, tmp_path / "out"), wanted)


def native(base: Base, spell: Callable[[str], str], pair: tuple[str, str]) -> tuple[Any, Any]:
    """(a native file's tensors, the base with their deltas added by hand)."""
    generator = torch.Generator().manual_seed(7)
    model, tensors = copy.deepcopy(base.model), {}
    for number, (name, module) in enumerate(sorted(model.named_modules())):
        if not name.endswith("_proj") or number % 3 == 0:
            continue
        rank = 2 + number % 3
        out, inner = module.weight.shape
        down, up = (torch.randn(s, generator=generator) * 0.1 for s in ((rank, inner), (out, rank)))
        alpha = float(number % 5) + 0.5
        word = spell(name)
        tensors[f"{word}{pair[0]}.weight"], tensors[f"{word}{pair[1]}.weight"] = down, up
        if number % 2:
            tensors[f"{word}.alpha"] = torch.tensor(alpha)
        else:
            alpha = float(rank)
        with torch.no_grad():
            module.weight += alpha / rank * (up @ down)
    return tensors, model


SPELLINGS: dict[str, tuple[Callable[[str], str], tuple[str, str]]] = {
    "Kohya": (
        lambda name: f"lora_te_{name}".replace(".", "_"),
        (".lora_down", ".lora_up"),
    ),
    "diffusers": (
        lambda name: f"text_encoder.{name}",
        (".lora_linear_layer.down", ".lora_linear_layer.up"),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_native_files_become_pefts(base: Base, tmp_path: Path, spelling: str) -> None:
    tensors, model = native(base, *SPELLINGS[spelling])
    source = tmp_path / "x.safetensors"
    save_file(tensors, source)
    wanted = logits(model)
    for number, told in enumerate((None, base.path)):
        out = converted(source, tmp_path / f"out{number}", told)
        assert_close(peft_logits(base, out), wanted, spelling)
    config = json.loads((tmp_path / "out0" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None and config["alpha_pattern"]


def test_fused_factors_are_split_for_the_model(base: Base, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = (("self_attn.qkv_proj", 128), ("mlp.gate_up_proj", 192))
    tensors, model = {}, copy.deepcopy(base.model)
    for layer, (path, out) in ((0, sizes[0]), (1, sizes[1])):
        name = f"base_model.model.model.layers.{layer}.{path}"
        a, b = (torch.randn(s, generator=generator) * 0.1 for s in ((2, 64), (out, 2)))
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        owner = model.model.layers[layer]
        block = owner.self_attn if layer == 0 else owner.mlp
        names = ("q_proj", "k_proj", "v_proj") if layer == 0 else ("gate_proj", "up_proj")
        start = 0
        for part in names:
            weight = getattr(block, part).weight
            with torch.no_grad():
                weight += 3 / 2 * (b[start : start + len(weight)] @ a)
            start += len(weight)
        assert start == out
    folder = tmp_path / "x"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["qkv_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    out = converted(folder, tmp_path / "out", base.path)
    assert_close(peft_logits(base, out), logits(model), "fused")


KOHYA_WORD = "lora_te_model_layers_0_mlp_up_proj"


def _pair(module: str, down: str = "lora_down", up: str = "lora_up") -> dict[str, torch.Tensor]:
    return {f"{module}.{down}.weight": torch.ones(2, 4), f"{module}.{up}.weight": torch.ones(4, 2)}


def _half() -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in _pair(KOHYA_WORD).items() if "up.weight" in key}


REFUSED: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]] = {
    "PEFT without a config": (
        lambda: _pair("base_model.model.model.layers.0.self_attn.q_proj", "lora_A", "lora_B"),
        "there is no adapter_config.json beside it",
    ),
    "DoRA": (
        lambda: {**_pair(KOHYA_WORD), f"{KOHYA_WORD}.dora_scale": torch.ones(4)},
        "is a DoRA magnitude; only plain LoRA",
    ),
    "LoHa": (lambda: {f"{KOHYA_WORD}.hada_w1_a": torch.ones(4)}, "is a LoHa tensor"),
    "an image model": (
        lambda: _pair("lora_unet_down_blocks_0_attentions_0_proj_in"),
        "names no usual module of a decoder: give --model DIR",
    ),
    "half a pair": (_half, "has no counterpart"),
    "nothing": (dict, "holds no LoRA tensors"),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(
    tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = REFUSED[named]
    save_file(make(), tmp_path / "x.safetensors")
    assert main(["convert", str(tmp_path / "x.safetensors"), "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_folders_that_hold_no_one_thing_to_convert_are_refused(
    base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    out = str(tmp_path / "out")
    pickled(base, tmp_path / "peft", 1, target_modules=["q_proj"])
    tensors = torch.load(tmp_path / "peft" / "adapter_model.bin", weights_only=True)
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors")
    for source, said in (
        (tmp_path / "no", "there is no such file or folder"),
        (tmp_path / "x", "has no adapter_model.safetensors"),
        (tmp_path / "peft", "is a PEFT adapter in safetensors already"),
    ):
        assert main(["convert", str(source), "--out", out]) == 1
        assert said in capsys.readouterr().err
    for name in ("a.bin", "b.pt"):
        torch.save({}, tmp_path / "x" / name)
    assert main(["convert", str(tmp_path / "x"), "--out", out]) == 1
    assert "holds a.bin, b.pt: name the file that is meant" in capsys.readouterr().err
