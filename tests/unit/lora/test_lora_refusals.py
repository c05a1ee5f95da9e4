"""What cannot be served exactly is refused before it serves, with the file and the key at fault."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_kit import Q0, Q1, SPEC, Q, load, refusal

from mstar_tp.common.errors import AdapterError
from mstar_tp.testing.lora_files import STANDARD, pair, q_pairs, write_adapter


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [9, 2]}, "alora_invocation_tokens"),
        ({"bias": "all"}, "bias"),
        ({"a_new_setting": 3}, "a_new_setting"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"r": None}, " r is missing"),
        ({"r": 0}, " r is 0"),
        ({"r": True}, " r is True"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern"),
        *(
            ({"peft_type": kind}, kind)
            for kind in ("IA3", "ADALORA", "VERA", "LOHA", "PROMPT_TUNING", "XLORA")
        ),
        ({"peft_type": None}, "peft_type"),
        *(
            ({"init_lora_weights": v}, v)
            for v in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga")
        ),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_named(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    assert named in refusal(write_adapter(tmp_path, q_pairs(SPEC), **config))


@pytest.mark.parametrize(
    ("key", "shape", "named"),
    [
        (f"{Q0}.lora_magnitude_vector", (8,), "DoRA"),
        (f"{Q0}.lora_B.bias", (8,), "lora_bias"),
        ("base_model.model.lm_head.weight", (32, 8), "lm_head"),
        ("base_model.model.model.embed_tokens.weight", (32, 8), "embed_tokens"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (2, 32), "lora_embedding_A"),
        ("base_model.model.lm_head.lora_A.weight", (2, 8), "lm_head"),
        ("base_model.model.lm_head.base_layer.weight", (32, 8), "base_layer"),
        ("base_model.model.score.weight", (3, 8), "score"),
        (f"{Q0}.lora_E", (2, 1), "AdaLoRA"),
        ("lora_unet_down_blocks_0_to_q.lora_down.weight", (2, 8), "Kohya"),
        (f"{Q0}.hada_w1_a", (2, 8), "LoHa"),
        (f"{Q0}.lokr_w1", (2, 8), "LoKr"),
        (f"{Q0}.diff", (2, 8), ".diff"),
        (f"{Q0}.norm", (8,), "LyCORIS"),
        (f"{Q0}.oft_r", (2, 8), "OFT"),
        (f"{Q0}.vera_lambda_b", (8,), "VeRA"),
        (f"{Q0}.ia3_l", (8,), "IA3"),
        (f"{Q0}.lora_a", (8, 2), "MLX"),
        (f"{Q0}.lora_magnitude_vector.weight", (8,), "DoRA"),
        ("prompt_embeddings", (4, 8), "prompt"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", (2, 8), "qkv_proj"),
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", (2, 8), "experts"),
        (
            "base_model.model.model.layers.0.input_layernorm.lora_A.weight",
            (2, 8),
            "input_layernorm",
        ),
    ],
)
def test_a_tensor_that_nothing_takes_is_named(
    tmp_path: Path, key: str, shape: tuple[int, ...], named: str
) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC) | {key: torch.ones(shape)}))
    assert named in text and key in text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"layers_to_transform": [0]}, "layers_to_transform does not name layer 1"),
        ({"layers_to_transform": 0}, "layers_to_transform does not name layer 1"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules names it"),
        ({"exclude_modules": ["model.layers.1.self_attn.q_proj"]}, "exclude_modules names it"),
        ({"exclude_modules": r".*\.1\..*"}, "exclude_modules names it"),
        ({"exclude_modules": "(a|b)*"}, "exclude_modules"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform"),
        ({"target_modules": [1]}, "target_modules"),
    ],
)
def test_tensors_that_peft_would_not_load_are_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), **config))
    assert named in text


def test_settings_that_select_what_is_in_the_file_are_honoured(tmp_path: Path) -> None:
    settings = {"layers_to_transform": [0, 1], "exclude_modules": ["k_proj", "lm_head"]}
    assert load(write_adapter(tmp_path, q_pairs(SPEC), **settings)).b


@pytest.mark.parametrize("index", ["2", "01", "-1", "1e0", "\uff19"])
def test_a_layer_the_base_has_not_is_refused(tmp_path: Path, index: str) -> None:
    tensors = q_pairs(SPEC) | pair(f"base_model.model.model.layers.{index}.{Q}", 8, 8)
    text = refusal(write_adapter(tmp_path, tensors))
    assert index in text
    assert index != "2" or ("layers.2" in text and "2 layers" in text)


def test_r_that_disagrees_with_the_tensors_is_refused_with_both(tmp_path: Path) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC, rank=2), r=4))
    assert "q_proj" in text and "[2, 8]" in text and "[4, 8]" in text


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_half_a_pair_is_refused_with_the_missing_key(tmp_path: Path, half: str) -> None:
    tensors = q_pairs(SPEC)
    missing = f"{Q1}.{half}.weight"
    del tensors[missing]
    assert missing in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize(
    ("module", "size_in", "size_out"),
    [(Q, 16, 16), (Q, 8, 4), ("mlp.down_proj", 12, 8), ("mlp.gate_proj", 8, 8)],
)
def test_an_adapter_of_another_width_is_refused_even_at_a_shards_size(
    tmp_path: Path, module: str, size_in: int, size_out: int
) -> None:
    name = STANDARD.format(layer=0, module=module)
    text = refusal(write_adapter(tmp_path, pair(name, size_in, size_out)))
    assert module in text and "wanted" in text


def test_a_rank_above_the_limit_is_refused_for_the_one_module(tmp_path: Path) -> None:
    tensors = pair(Q0, 8, 8, rank=5) | pair(Q1, 8, 8, rank=2)
    text = refusal(write_adapter(tmp_path, tensors, rank_pattern={"layers.0.self_attn.q_proj": 5}))
    assert "layers.0.self_attn.q_proj" in text and "rank 5" in text and "at most 4" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_counted_by_tensor(tmp_path: Path, value: float) -> None:
    tensors = q_pairs(SPEC)
    tensors[f"{Q1}.lora_B.weight"][3, 1] = value
    text = refusal(write_adapter(tmp_path, tensors))
    assert f"{Q1}.lora_B.weight" in text and " 1 value" in text


def test_what_overflows_the_slots_dtype_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC, b=60000.0))
    with pytest.raises(AdapterError, match="not finite"):
        load(folder, torch.float16)


def test_two_adapter_names_in_one_file_are_both_named(tmp_path: Path) -> None:
    tensors = {k.replace(".weight", ".default.weight"): v for k, v in pair(Q0, 8, 8).items()}
    tensors |= {k.replace(".weight", ".other.weight"): v for k, v in pair(Q1, 8, 8).items()}
    text = refusal(write_adapter(tmp_path, tensors))
    assert "default" in text and "other" in text


def test_two_spellings_of_one_module_are_refused(tmp_path: Path) -> None:
    text = refusal(write_adapter(tmp_path, pair(Q0, 8, 8) | pair(f"layers.0.{Q}", 8, 8)))
    assert "both name one module" in text


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "no LoRA tensors" in refusal(write_adapter(tmp_path, {}))


def test_factors_of_zero_are_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = load(write_adapter(tmp_path, q_pairs(SPEC, b=0.0)))
    assert not any(tensor.any() for tensor in adapter.b.values())
    assert "adapter 'x' has no effect" in caplog.text
    caplog.clear()
    assert load(write_adapter(tmp_path, q_pairs(SPEC))).b and not caplog.text


def test_integer_factors_are_refused(tmp_path: Path) -> None:
    tensors = {k: v.to(torch.int32) for k, v in q_pairs(SPEC).items()}
    assert "I32" in refusal(write_adapter(tmp_path, tensors))


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", q_pairs(SPEC))
    (folder / "adapter_model.safetensors").unlink()
    # A folder in its place: whatever opens it fails loudly.
    (folder / "adapter_model.bin").mkdir()
    text = refusal(folder)
    assert "adapter_model.bin" in text and "safetensors" in text


def test_a_pickle_that_would_run_code_runs_none(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> Any:
            return marker.touch, ()

    folder = write_adapter(tmp_path / "x", q_pairs(SPEC))
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    text = refusal(folder)
    assert "adapter_model.bin" in text and "`mstar-tp convert`" in text
    assert "adapter_model.bin" in refusal(folder / "adapter_model.bin")
    (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")
    assert str(folder / "adapter_model.safetensors") in refusal(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["truncated", "padded", "empty", "pointer"])
def test_a_damaged_file_is_refused_by_path(tmp_path: Path, kind: str) -> None:
    weights = write_adapter(tmp_path, q_pairs(SPEC)) / "adapter_model.safetensors"
    data = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    weights.write_bytes(
        {"truncated": data[:-1], "padded": data + b"\0" * 4, "empty": b"", "pointer": pointer}[kind]
    )
    text = refusal(tmp_path)
    assert str(weights) in text
    assert kind != "pointer" or "LFS" in text


def test_missing_folders_files_and_bad_json_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    folder = write_adapter(tmp_path / "x", q_pairs(SPEC))
    (folder / "adapter_config.json").write_text("[1]")
    assert "JSON object" in refusal(folder)
    (folder / "adapter_config.json").write_text("{")
    assert "JSON" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(folder)


def test_a_config_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " " * (4 << 20))
    assert f"{config}: is larger than 4194304 bytes" in refusal(folder)
