"""One adapter, however it is spelled: prefixes, wrappers, fused names, shards, Kohya, diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapter_kit import Q0, Q1, SPEC, change, everywhere, load, q_change, refusal

from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.testing.lora_files import STANDARD, pair, q_pairs, random_pairs, write_adapter

Tensors = dict[str, torch.Tensor]
STEM = "base_model.model.model.layers"


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


def same(one: LoadedAdapter, two: LoadedAdapter) -> bool:
    return (
        one.digest == two.digest
        and one.a.keys() == two.a.keys()
        and all(torch.equal(one.a[t], two.a[t]) for t in one.a)
        and all(torch.equal(one.b[t], two.b[t]) for t in one.b)
    )


def lone_file(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "x.safetensors", metadata)
    return folder / "x.safetensors"


# ---------------------------------------------------------------------------------- PEFT's names


@pytest.mark.parametrize(
    "stem",
    [
        "base_model.model.model.layers",
        "base_model.model.layers",
        "base_model.layers",
        "model.model.layers",
        "model.layers",
        "layers",
        "module.base_model.model.model.layers",
        "base_model.model.model.language_model.layers",
        "base_model.model.language_model.model.layers",
        "base_model.model._orig_mod.model.layers",
        "_fsdp_wrapped_module.base_model.model.model._fsdp_wrapped_module.layers",
    ],
)
def test_every_prefix_gives_the_same_copy_and_digest(tmp_path: Path, stem: str) -> None:
    tensors = random_pairs(SPEC, rank=2, seed=0)
    one = load(write_adapter(tmp_path / "a", tensors))
    two = load(
        write_adapter(tmp_path / "b", renamed(tensors, "base_model.model.model.layers", stem))
    )
    assert same(one, two)


def test_wrappers_within_a_layer_are_passed_over(tmp_path: Path) -> None:
    tensors = random_pairs(SPEC, rank=2, seed=0)
    one = load(write_adapter(tmp_path / "a", tensors))
    wrapped = renamed(tensors, ".self_attn.", "._checkpoint_wrapped_module.self_attn.")
    assert same(one, load(write_adapter(tmp_path / "b", wrapped)))


@pytest.mark.parametrize(
    "stem", ["vision_tower.model.layers", "decoder.layers", "model.layers.0.layers", "modellayers"]
)
def test_another_part_of_a_model_is_not_taken_for_this_one(tmp_path: Path, stem: str) -> None:
    tensors = renamed(q_pairs(SPEC), STEM, stem)
    assert next(iter(tensors)) in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize("name", ["default", "my-adapter_0"])
def test_one_adapter_name_in_the_keys_is_stripped(tmp_path: Path, name: str) -> None:
    tensors = renamed(q_pairs(SPEC), ".weight", f".{name}.weight")
    assert everywhere(q_change(load(write_adapter(tmp_path, tensors))), 0.04)


def test_patterns_find_modules_by_the_files_name_and_by_the_models(tmp_path: Path) -> None:
    """PEFT names modules from whatever it wrapped; the file's prefix tells only sometimes."""
    tensors = pair("layers.0.self_attn.q_proj", 8, 8, rank=4) | pair(
        "layers.1.self_attn.q_proj", 8, 8, rank=2
    )
    for pattern in ("model.layers.0.self_attn.q_proj", "^layers.0.self_attn.q_proj"):
        folder = write_adapter(tmp_path, tensors, rank_pattern={pattern: 4})
        assert load(folder).lora_rank == 4


# ---------------------------------------------------------------------------------- fused linears


def ramp(rows: int) -> torch.Tensor:
    return ((torch.arange(rows) + 1.0) / 100)[:, None].repeat(1, 2)


def fused(layer: int = 0) -> Tensors:
    qkv = STANDARD.format(layer=layer, module="self_attn.qkv_proj")
    gate_up = STANDARD.format(layer=layer, module="mlp.gate_up_proj")
    a = ramp(2)[:, :1].repeat(1, 8)
    return {
        f"{qkv}.lora_A.weight": a,
        f"{qkv}.lora_B.weight": ramp(16),
        f"{gate_up}.lora_A.weight": a,
        f"{gate_up}.lora_B.weight": ramp(32),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_factors_of_fused_linears_go_to_each_slice_with_one_a(
    tmp_path: Path, world_size: int
) -> None:
    """q has rows 0 to 7 of B, k 8 to 11, v 12 to 15; gate 0 to 15 and up 16 to 31."""
    folder = write_adapter(tmp_path, fused(), target_modules=["qkv_proj", "gate_up_proj"])
    sizes = {"self_attn.qkv_proj": (8, 4, 4), "mlp.gate_up_proj": (16, 16)}
    for rank in range(world_size):
        adapter = load(folder, rank=rank, world_size=world_size)
        for name, parts in sizes.items():
            kept, first, start = adapter.b[name][0] / 2, 0, 0  # alpha / r is 2
            for index, size in enumerate(parts):
                share = size // world_size
                rows = ramp(32)[start + rank * share : start + (rank + 1) * share]
                torch.testing.assert_close(kept[first : first + share, :2], rows)
                a = adapter.a[name][0, index * SPEC.max_rank : index * SPEC.max_rank + 2]
                torch.testing.assert_close(a, ramp(2)[:, :1].repeat(1, 8))
                first, start = first + share, start + size


def test_fused_and_split_names_in_one_file_may_not_meet(tmp_path: Path) -> None:
    text = refusal(write_adapter(tmp_path, fused() | pair(Q0, 8, 8)))
    assert "qkv_proj" in text and "q_proj" in text and "both change" in text
    # On different layers they may.
    assert load(write_adapter(tmp_path, fused(0) | pair(Q1, 8, 8))).b


@pytest.mark.parametrize("rows", [12, 24])
def test_a_fused_factor_of_another_height_is_refused(tmp_path: Path, rows: int) -> None:
    tensors = fused()
    key = f"{STEM}.0.self_attn.qkv_proj.lora_B.weight"
    tensors[key] = torch.ones(rows, 2)
    text = refusal(write_adapter(tmp_path, tensors))
    assert key in text and f"[{rows}, 2]" in text and "[16, 2]" in text


# ---------------------------------------------------------------------------------- several files


def split(folder: Path, *, lose: str | None = None) -> Path:
    """The standard adapter in two files, all A in one and all B in the other."""
    tensors = load_file(write_adapter(folder, q_pairs(SPEC)) / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    names = {
        half: f"adapter_model-0000{n}-of-00002.safetensors" for n, half in ((1, "A"), (2, "B"))
    }
    homes = {key: names["A" if "lora_A" in key else "B"] for key in tensors}
    for name in names.values():
        part = {key: tensors[key] for key in tensors if homes[key] == name}
        if name != lose:
            save_file(part, folder / name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def test_a_sharded_adapter_is_the_one_in_a_single_file(tmp_path: Path) -> None:
    one = load(write_adapter(tmp_path / "one", q_pairs(SPEC)))
    assert same(one, load(split(tmp_path / "two")))


def test_shards_must_be_those_that_their_index_lists(tmp_path: Path) -> None:
    second = "adapter_model-00002-of-00002.safetensors"
    assert second in refusal(split(tmp_path / "lost", lose=second))

    folder = split(tmp_path / "extra")
    (folder / "adapter_model-00003-of-00003.safetensors").write_bytes(
        (folder / second).read_bytes()
    )
    assert "adapter_model-00003" in refusal(folder)

    folder = split(tmp_path / "swapped")
    first = "adapter_model-00001-of-00002.safetensors"
    (folder / first).write_bytes((folder / second).read_bytes())
    assert first in refusal(folder)

    folder = split(tmp_path / "both")
    write_adapter(folder, q_pairs(SPEC))
    assert "index.json" in refusal(folder) and "both" in refusal(folder)

    folder = split(tmp_path / "no index")
    (folder / "adapter_model.safetensors.index.json").unlink()
    assert "index.json" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "x.bin", 3])
def test_an_index_that_leads_elsewhere_is_not_followed(tmp_path: Path, name: Any) -> None:
    folder = split(tmp_path)
    index = folder / "adapter_model.safetensors.index.json"
    homes = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(homes, name)}))
    assert str(index) in refusal(folder)


def test_a_shard_that_changed_since_the_check_is_refused(tmp_path: Path) -> None:
    from mstar_tp.lora.reading.shards import read_adapter
    from mstar_tp.wire.values import AdapterKey

    folder = split(tmp_path)
    file = check_adapter_file(SPEC, "x", folder)
    shard = folder / "adapter_model-00002-of-00002.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(shard).items()}, shard)
    with pytest.raises(ValueError, match=r"00002-of-00002.* has changed since"):
        read_adapter(
            SPEC,
            AdapterKey("x", 1),
            file,
            rank=0,
            world_size=1,
            dtype=torch.float32,
            page_locked=False,
        )


# ------------------------------------------------------------------------------ Kohya and diffusers


def kohya(prefix: str = "lora_te_model_layers_", alpha: float | None = 1.0) -> Tensors:
    """Both halves of q_proj in both layers, every entry 0.1, rank 2."""
    tensors: Tensors = {}
    for layer in (0, 1):
        name = f"{prefix}{layer}_self_attn_q_proj"
        tensors[f"{name}.lora_down.weight"] = torch.full((2, 8), 0.1)
        tensors[f"{name}.lora_up.weight"] = torch.full((8, 2), 0.1)
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.mark.parametrize(
    "prefix",
    [
        "lora_te_model_layers_",
        "lora_te1_model_layers_",
        "lora_te_layers_",
        "lora_llm_model_layers_",
        "lora_model_layers_",
        "lycoris_model_layers_",
        "lora_text_encoder_model_layers_",
        "lora_te_language_model_model_layers_",
    ],
)
def test_kohya_names_and_alphas(tmp_path: Path, prefix: str) -> None:
    adapter = load(lone_file(tmp_path, kohya(prefix)))
    assert everywhere(q_change(adapter, 0), 0.01) and everywhere(q_change(adapter, 1), 0.01)


def test_kohya_without_alpha_means_alpha_equal_to_the_rank(tmp_path: Path) -> None:
    assert everywhere(q_change(load(lone_file(tmp_path, kohya(alpha=None)))), 0.02)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
)
def test_alphas_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = kohya()
    for key in tensors:
        if key.endswith(".alpha"):
            tensors[key] = torch.tensor([4.0]).to(dtype)
    assert everywhere(q_change(load(lone_file(tmp_path, tensors))), 0.04)


def test_ranks_and_alphas_of_kohya_modules_may_differ(tmp_path: Path) -> None:
    tensors = kohya()
    tensors["lora_te_model_layers_1_self_attn_q_proj.lora_down.weight"] = torch.full((4, 8), 0.1)
    tensors["lora_te_model_layers_1_self_attn_q_proj.lora_up.weight"] = torch.full((8, 4), 0.1)
    adapter = load(lone_file(tmp_path, tensors))
    assert adapter.lora_rank == 4
    assert everywhere(q_change(adapter, 0), 0.01) and everywhere(q_change(adapter, 1), 0.01)


def test_factors_of_a_convolution_are_refused_on_a_linear(tmp_path: Path) -> None:
    tensors = {k: v[..., None, None] if v.dim() == 2 else v for k, v in kohya().items()}
    assert "lora_A is [2, 8, 1, 1], wanted [2, 8]" in refusal(lone_file(tmp_path, tensors))


def test_a_folder_with_one_safetensors_file_of_any_name_is_that_file(tmp_path: Path) -> None:
    adapter = load(lone_file(tmp_path, kohya()).parent)
    assert everywhere(q_change(adapter), 0.01)
    save_file(kohya(), tmp_path / "y.safetensors")
    assert "2 safetensors files" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("down", "up"),
    [
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
        (".lora_down.weight", ".lora_up.weight"),
        (".lora_A.weight", ".lora_B.weight"),
    ],
)
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_diffusers_names(tmp_path: Path, down: str, up: str, alpha: float | None) -> None:
    tensors = {}
    for key, tensor in kohya("text_encoder.model.layers.", alpha).items():
        dotted = key.replace("_self_attn_q_proj", ".self_attn.q_proj")
        dotted = dotted.replace(".lora_down.weight", down).replace(".lora_up.weight", up)
        tensors[dotted] = tensor
    adapter = load(lone_file(tmp_path, tensors))
    assert everywhere(q_change(adapter), 0.02 if alpha is None else 0.01)


def test_diffusers_metadata_is_pefts_config(tmp_path: Path) -> None:
    tensors = {
        key.removeprefix("base_model.model.").replace(
            "model.layers", "text_encoder.model.layers"
        ): t
        for key, t in q_pairs(SPEC).items()
    }
    settings = {"r": 2, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj"]}
    flat = {f"text_encoder.{key}": value for key, value in settings.items()}
    metadata = {"lora_adapter_metadata": json.dumps(flat)}
    adapter = load(lone_file(tmp_path, tensors, metadata))
    assert everywhere(q_change(adapter), 4 / 2**0.5 * 2 * 0.01)
    metadata = {"lora_adapter_metadata": "{"}
    assert "lora_adapter_metadata" in refusal(lone_file(tmp_path, tensors, metadata))


@pytest.mark.parametrize("named", ["lora_te{}", "lora_text_encoder_{}", "text_encoder_{}."])
def test_factors_of_two_text_encoders_are_not_taken_for_one(tmp_path: Path, named: str) -> None:
    """Not even where no module is in both."""
    tensors: Tensors = {}
    for number, module in enumerate(("q_proj", "o_proj"), start=1):
        name = f"{named.format(number)}model.layers.0.self_attn.{module}"
        if named.startswith("lora"):
            name = name.replace("model.", "_model.").replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = torch.ones(2, 8)
        tensors[f"{name}.lora_up.weight"] = torch.ones(8, 2)
    text = refusal(lone_file(tmp_path, tensors))
    assert "several text encoders" in text
    one = {key: tensor for key, tensor in tensors.items() if "q_proj" in key}
    assert everywhere(q_change(load(lone_file(tmp_path / "one", one))), 2.0)


def test_a_kohya_key_of_another_model_names_the_key_and_the_missing_config(tmp_path: Path) -> None:
    key = "lora_unet_down_blocks_0_attentions_0_to_q"
    tensors = {
        f"{key}.lora_down.weight": torch.full((2, 8), 0.1),
        f"{key}.lora_up.weight": torch.full((8, 2), 0.1),
        f"{key}.alpha": torch.tensor(1.0),
    }
    text = refusal(lone_file(tmp_path, tensors))
    assert f"{key}.lora_down.weight" in text and "Kohya" in text and "adapter_config.json" in text


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ("lora_te_model_layers_7", "layers.7"),
        ("lora_te_model_layers_01", "01"),
        ("lora_te_text_model_encoder_layers_0", "text_model_encoder_layers_0"),
    ],
)
def test_a_kohya_layer_that_the_model_has_not_is_refused(
    tmp_path: Path, prefix: str, named: str
) -> None:
    tensors = kohya() | {
        f"{prefix}_self_attn_q_proj.lora_down.weight": torch.ones(2, 8),
        f"{prefix}_self_attn_q_proj.lora_up.weight": torch.ones(8, 2),
    }
    assert named in refusal(lone_file(tmp_path, tensors))


def test_a_scaling_with_two_sources_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", kohya())
    assert "lora_te_model_layers_0_self_attn_q_proj" in refusal(folder)
    folder = write_adapter(tmp_path / "b", q_pairs(SPEC) | {f"{Q0}.alpha": torch.tensor(1.0)})
    assert f"{Q0}.alpha" in refusal(folder)
    metadata = {"ss_network_args": json.dumps({"rs_lora": True})}
    assert "ss_network_args" in refusal(lone_file(tmp_path / "c", kohya(), metadata))


@pytest.mark.parametrize(
    ("key", "tensor", "named"),
    [
        ("lora_te_model_layers_0_self_attn_k_proj.alpha", torch.tensor(1.0), "belongs to no"),
        ("lora_te_model_layers_0_self_attn_q_proj.alpha", torch.ones(2), "one number"),
        ("lora_te_model_layers_0_self_attn_q_proj.alpha", torch.tensor(float("nan")), "nan"),
        ("lora_te_model_layers_0_self_attn_q_proj.dora_scale", torch.ones(8), "DoRA"),
        ("lora_te_model_layers_0_self_attn_q_proj.lora_mid.weight", torch.ones(2, 2), "Tucker"),
        ("lora_te_model_layers_0_self_attn_q_proj.hada_w1_a", torch.ones(8, 2), "LoHa"),
        ("lora_te_model_layers_0_self_attn_q_proj.lokr_w1", torch.ones(2, 2), "LoKr"),
        ("lora_te_model_layers_0_self_attn_q_proj.diff", torch.ones(8, 8), "LyCORIS"),
        ("lora_te_model_layers_0_self_attn_k_proj.lora_down.weight", torch.ones(2, 8), "lora_up"),
        ("lora_te_model_layers_0_self_attn_q_proj.lora_down.weight", torch.ones(0, 8), "rank"),
    ],
)
def test_a_kohya_tensor_that_cannot_be_honoured_is_named(
    tmp_path: Path, key: str, tensor: torch.Tensor, named: str
) -> None:
    text = refusal(lone_file(tmp_path, kohya() | {key: tensor}))
    assert key in text and named in text


def test_peft_keys_without_a_config_are_refused(tmp_path: Path) -> None:
    text = refusal(lone_file(tmp_path, q_pairs(SPEC)))
    assert "adapter_config.json" in text and Q0 in text


def test_every_slice_of_the_model_can_be_spelled_in_kohyas_way(tmp_path: Path) -> None:
    tensors = random_pairs(SPEC, rank=2, seed=5)
    words = {}
    for key, tensor in tensors.items():
        module, _, half = key.removeprefix("base_model.model.").rpartition(".lora_")
        word = "lora_te_" + module.replace(".", "_")
        words[f"{word}.lora_{'down' if half[0] == 'A' else 'up'}.weight"] = tensor
        words[f"{word}.alpha"] = torch.tensor(4.0)
    one, two = load(write_adapter(tmp_path / "a", tensors)), load(lone_file(tmp_path / "b", words))
    assert same(one, two)
    assert torch.equal(change(one, "mlp.down_proj", 1, 0), change(two, "mlp.down_proj", 1, 0))
