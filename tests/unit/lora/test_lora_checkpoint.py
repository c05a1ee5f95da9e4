"""Adapter files are served exactly: placement, scaling, identity and digest."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapter_kit import Q0, Q1, SPEC, change, everywhere, load, q_change

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.shards import read_adapter
from mstar_tp.testing.lora_files import pair, q_pairs, write_adapter
from mstar_tp.wire.values import AdapterKey


def test_the_standard_adapter_is_scaled_by_alpha_over_r(tmp_path: Path) -> None:
    adapter = load(write_adapter(tmp_path, q_pairs(SPEC)))
    assert everywhere(q_change(adapter, 0), 0.04) and everywhere(q_change(adapter, 1), 0.04)
    assert set(adapter.a) == {"self_attn.qkv_proj"}
    assert not change(adapter, "self_attn.qkv_proj", 0, 1).any()


def test_rank_and_alpha_patterns_are_resolved_module_by_module(tmp_path: Path) -> None:
    tensors = pair(Q0, 8, 8, rank=4) | pair(Q1, 8, 8, rank=2)
    where = "layers.0.self_attn.q_proj"
    folder = write_adapter(tmp_path, tensors, rank_pattern={where: 4}, alpha_pattern={where: 16})
    adapter = load(folder)
    assert adapter.lora_rank == 4
    assert everywhere(q_change(adapter, 0), 0.16) and everywhere(q_change(adapter, 1), 0.04)


def test_rank_stabilised_scaling_divides_by_the_root_of_r(tmp_path: Path) -> None:
    adapter = load(write_adapter(tmp_path, q_pairs(SPEC), use_rslora=True))
    assert everywhere(q_change(adapter), 4 / math.sqrt(2) * 2 * 0.01)


@pytest.mark.parametrize(
    "modules",
    [
        r".*layers\.0\..*q_proj",
        "all-linear",
        ["model.layers.0.self_attn.q_proj"],
        ["self_attn.q_proj"],
    ],
)
def test_the_tensors_decide_which_modules_are_adapted(tmp_path: Path, modules: Any) -> None:
    adapter = load(write_adapter(tmp_path, q_pairs(SPEC), target_modules=modules))
    assert everywhere(q_change(adapter), 0.04)


@pytest.mark.parametrize(
    "prefix", ["base_model.model.model.layers", "base_model.model.layers", "model.layers", "layers"]
)
def test_every_prefix_gives_the_same_copy_and_digest(tmp_path: Path, prefix: str) -> None:
    tensors = q_pairs(SPEC)
    renamed = {k.replace("base_model.model.model.layers", prefix): v for k, v in tensors.items()}
    one, two = (
        load(write_adapter(tmp_path / "a", tensors)),
        load(write_adapter(tmp_path / "b", renamed)),
    )
    assert torch.equal(q_change(one), q_change(two)) and one.digest == two.digest


@pytest.mark.parametrize("name", ["default", "my-adapter_0"])
def test_one_adapter_name_in_the_keys_is_stripped(tmp_path: Path, name: str) -> None:
    renamed = {k.replace(".weight", f".{name}.weight"): v for k, v in q_pairs(SPEC).items()}
    assert everywhere(q_change(load(write_adapter(tmp_path, renamed))), 0.04)


def test_different_ranks_and_alphas_of_one_fused_linear_stay_apart(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn"
    tensors = (
        pair(f"{name}.q_proj", 8, 8, rank=2)
        | pair(f"{name}.k_proj", 8, 4, rank=4)
        | pair(f"{name}.v_proj", 8, 4, rank=1)
    )
    folder = write_adapter(
        tmp_path,
        tensors,
        rank_pattern={"k_proj": 4, "v_proj": 1},
        alpha_pattern={"k_proj": 4, "v_proj": 8},
    )
    adapter = load(folder)
    changes = [change(adapter, "self_attn.qkv_proj", 0, i) for i in range(3)]
    assert [everywhere(c, v) for c, v in zip(changes, (0.04, 0.04, 0.08), strict=True)] == [
        True
    ] * 3


def test_mixed_dtypes_are_cast_once_after_scaling(tmp_path: Path) -> None:
    tensors = {
        f"{Q0}.lora_A.weight": torch.full((2, 8), 0.125, dtype=torch.bfloat16),
        f"{Q0}.lora_B.weight": torch.full((8, 2), 0.5, dtype=torch.float32),
        f"{Q1}.lora_A.weight": torch.full((2, 8), 0.125, dtype=torch.float16),
        f"{Q1}.lora_B.weight": torch.full((8, 2), 0.5, dtype=torch.bfloat16),
    }
    adapter = load(write_adapter(tmp_path, tensors), torch.bfloat16)
    assert everywhere(q_change(adapter, 0), 0.25) and everywhere(q_change(adapter, 1), 0.25)


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_odd_ranks_up_to_the_limit_are_exact(tmp_path: Path, rank: int) -> None:
    adapter = load(write_adapter(tmp_path, q_pairs(SPEC, rank=rank), r=rank))
    assert everywhere(q_change(adapter), 0.04)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_bias": True},
        {"alora_invocation_tokens": None},
        {"a_new_setting": None},
        {"another": False},
        {"init_lora_weights": "gaussian"},
        {"use_dora": False},
        {"modules_to_save": None},
    ],
)
def test_settings_that_are_off_or_without_effect_load(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert everywhere(q_change(load(write_adapter(tmp_path, q_pairs(SPEC), **config))), 0.04)


def _reordered(path: Path) -> None:
    """Write the same tensors in another order and at other offsets."""
    tensors = load_file(path)
    names = list(reversed(sorted(tensors)))
    entries, blobs, at = {}, [], 0
    for name in names:
        blob = tensors[name].numpy().tobytes()
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + len(blob)],
        }
        blobs.append(blob)
        at += len(blob)
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(blobs))


def test_the_digest_ignores_the_files_layout_and_sees_every_weight_and_setting(
    tmp_path: Path,
) -> None:
    tensors = q_pairs(SPEC)
    digest = load(write_adapter(tmp_path / "a", tensors)).digest
    other = write_adapter(tmp_path / "b", tensors)
    _reordered(other / "adapter_model.safetensors")
    assert load(other).digest == digest
    assert load(write_adapter(tmp_path / "c", tensors, lora_alpha=5)).digest != digest
    for index, name in enumerate(tensors):
        changed = {k: v.clone() for k, v in tensors.items()}
        changed[name].view(-1)[-1] += 1e-6
        assert load(write_adapter(tmp_path / f"d{index}", changed)).digest != digest


def test_a_file_overwritten_in_place_changes_no_copy_and_is_refused_when_read_again(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    file = check_adapter_file(SPEC, "x", folder)
    how: Any = {"rank": 0, "world_size": 1, "dtype": torch.float32, "page_locked": False}
    copy = read_adapter(SPEC, AdapterKey("x", 1), file, **how)
    before = q_change(copy).clone()
    weights = folder / "adapter_model.safetensors"
    with weights.open("r+b") as out:
        data = bytearray(weights.read_bytes())
        data[-64:] = bytes(64)
        out.write(data)
    assert torch.equal(q_change(copy), before)
    with pytest.raises(AdapterError, match="has changed since"):
        read_adapter(SPEC, AdapterKey("x", 1), file, **how)


def test_weights_that_hash_otherwise_than_pinned_are_refused(tmp_path: Path) -> None:
    file = check_adapter_file(SPEC, "x", write_adapter(tmp_path, q_pairs(SPEC)))
    with pytest.raises(AdapterError, match="digest"):
        read_adapter(
            SPEC,
            AdapterKey("x", 1),
            file,
            rank=0,
            world_size=1,
            dtype=torch.float32,
            page_locked=False,
            digest="0",
        )


def test_a_file_that_peft_wrote_is_what_peft_computes(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        vocab_size=32,
    )
    torch.manual_seed(0)
    model = get_peft_model(
        LlamaForCausalLM(config),
        LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules="all-linear",
            use_rslora=True,
            rank_pattern={r"layers\.1\.mlp\.down_proj": 2, "k_proj": 1},
            alpha_pattern={"v_proj": 7},
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    adapter = load(tmp_path)
    for target in SPEC.targets:
        for layer in range(target.num_layers):
            for index in range(len(target.out_slices)):
                module = model.get_submodule(f"base_model.model.{target.module(layer, index)}")
                wanted = module.get_delta_weight("default").detach()  # type: ignore[operator]
                torch.testing.assert_close(
                    change(adapter, target.name, layer, index), wanted, rtol=1e-5, atol=1e-6
                )


def test_save_and_load_roundtrip_needs_no_peft_names(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    assert everywhere(q_change(load(folder)), 0.04)
