"""Adapter files are served exactly or refused by name: placement, scaling and every refusal."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_tp.errors import AdapterError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.checkpoint import check_adapter_file
from mstar_tp.lora.shards import read_adapter
from mstar_tp.testing.lora_files import STANDARD, pair, q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.messages import AdapterKey

SPEC = tiny_spec()
Q = "self_attn.q_proj"
Q0, Q1 = (STANDARD.format(layer=n, module=Q) for n in (0, 1))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedAdapter:
    file = check_adapter_file(SPEC, "x", folder)
    key = AdapterKey("x", 1)
    return read_adapter(SPEC, key, file, rank=0, world_size=1, dtype=dtype, pin=False)


def change(adapter: LoadedAdapter, target: str, layer: int, index: int) -> torch.Tensor:
    """The weight change of one slice, [out, in], from the host copy."""
    places = {t.name: t for t in SPEC.targets}[target]
    sizes = [part.out_features for part in places.out_slices]
    first = sum(sizes[:index])
    a = adapter.a[target][layer, index * SPEC.max_rank : (index + 1) * SPEC.max_rank]
    return adapter.b[target][layer, first : first + sizes[index]].float() @ a.float()


def q_change(adapter: LoadedAdapter, layer: int = 0) -> torch.Tensor:
    return change(adapter, "self_attn.qkv_proj", layer, 0)


def everywhere(tensor: torch.Tensor, value: float) -> bool:
    return torch.allclose(tensor, torch.full_like(tensor, value), rtol=1e-6, atol=1e-8)


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        load(folder)
    text = str(caught.value)
    assert "'x'" in text and "Traceback" not in text
    return text


# ------------------------------------------------------------------------------- what is served


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
    assert adapter.rank == 4
    assert everywhere(q_change(adapter, 0), 0.16) and everywhere(q_change(adapter, 1), 0.04)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        r".*\.0\..*",
        "^model.layers.0.self_attn.q_proj",
    ],
)
def test_patterns_match_as_peft_matches_them(tmp_path: Path, pattern: str) -> None:
    from peft.utils.other import get_pattern_key

    from mstar_tp.lora.peft_config import _pattern_key

    module = "model.layers.0.self_attn.q_proj"
    table = {"k_proj": 1, pattern: 9}
    assert _pattern_key(table, module) == get_pattern_key(table.keys(), module) == pattern


def test_the_first_pattern_that_matches_wins_and_a_partial_name_does_not(tmp_path: Path) -> None:
    from mstar_tp.lora.peft_config import _pattern_key

    assert (
        _pattern_key({"q_proj": 1, "self_attn.q_proj": 2}, "model.layers.0.self_attn.q_proj")
        == "q_proj"
    )
    assert (
        _pattern_key({"proj": 1}, "model.layers.0.self_attn.q_proj")
        == "model.layers.0.self_attn.q_proj"
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "(q|k)_proj",
        r"model\.layers\.(?:0|1[0-9])\.self_attn\.[qk]_proj$",
        r"layers\.\d+\..*",
        r"layers.[^0]+\.self_attn.q_proj",
        "self_attn.q_pr?oj?",
        "attn.q_proj",
        "q_pro{1,2}j",
        r"\w+",
        "k_proj|",
        "layers.(1|(2|0)).self_attn.+?",
        "",
    ],
)
def test_accepted_patterns_mean_what_re_makes_of_them(pattern: str) -> None:
    from peft.utils.other import get_pattern_key

    from mstar_tp.lora.peft_config import _pattern_key

    for layer, name in ((0, "self_attn.q_proj"), (12, "self_attn.k_proj"), (1, "mlp.up_proj")):
        module = f"model.layers.{layer}.{name}"
        assert _pattern_key([pattern], module) == get_pattern_key([pattern], module)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(([a-z0-9_.]+)+)+X", "repeats a group"),
        ("(a|b)*X", "repeats a group"),
        (r"(.)\1", "not accepted"),
        ("(?=q)q_proj", "(?"),
        ("(?i)q_proj", "(?"),
        (".*.*.*.*X", "more than 3"),
        ("q++_proj", "no repeat"),
        ("q_proj{2", "no repeat"),
        ("(" * 20 + ")" * 20, "deep"),
        ("(q_proj", "does not end"),
        ("q_proj)", "nothing opened"),
        ("q{3,2}", "wrong way round"),
        ("[z-a]", "no class"),
        ("a" * 201, "201 characters"),
    ],
)
def test_a_pattern_that_could_take_for_ever_is_refused_by_name(
    tmp_path: Path, key: str, pattern: str, why: str
) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), **{key: {pattern: 4}}))
    assert key in text and why in text and "dotted ends" in text and len(text) < 1000


def test_alternatives_cost_no_more_than_their_length() -> None:
    from mstar_tp.lora.peft_config import _pattern_key

    module = "a" * 60
    assert _pattern_key(["(aa|a|.)" * 24 + "X"], module) == module


def test_more_patterns_than_any_model_has_modules_are_refused(tmp_path: Path) -> None:
    many = {f"m{n}": 4 for n in range(1001)}
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), alpha_pattern=many))
    assert "alpha_pattern has 1001 patterns, wanted at most 1000" in text


def test_a_config_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " " * (1 << 20))
    assert f"{config}: is larger than 1048576 bytes" in refusal(folder)


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


def test_an_adapter_without_effect_is_served_as_such(tmp_path: Path) -> None:
    assert not q_change(load(write_adapter(tmp_path, q_pairs(SPEC, b=0.0)))).any()


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


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
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


def test_a_sharded_adapter_is_refused_by_its_index(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC))
    (folder / "adapter_model.safetensors").rename(
        folder / "adapter_model-00001-of-00002.safetensors"
    )
    (folder / "adapter_model.safetensors.index.json").write_text("{}")
    assert "adapter_model.safetensors.index.json" in refusal(folder)


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
    assert "no folder" in refusal(tmp_path / "nowhere")
    folder = write_adapter(tmp_path / "x", q_pairs(SPEC))
    (folder / "adapter_config.json").write_text("[1]")
    assert "JSON object" in refusal(folder)
    (folder / "adapter_config.json").write_text("{")
    assert "JSON" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(folder)


# ------------------------------------------------------------------- identity, digest, copies


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
    how: Any = {"rank": 0, "world_size": 1, "dtype": torch.float32, "pin": False}
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
            pin=False,
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
