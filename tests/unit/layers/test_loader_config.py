"""Promise: config.json means to us what it means to transformers, and what is not served is refused
by its key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from mstar_tp.common.errors import CheckpointError
from mstar_tp.layers.rotary import RopeConfig
from mstar_tp.models.config.families import ModelConfig, architectures, load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 7,
    "sliding_window": 16,
}


def parse(
    folder: Path, tree: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(tree))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


def test_both_spellings_of_rope_and_dtype_read_alike(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **scaling},
        "torch_dtype": "bfloat16",
    }
    oldest = {**old, "rope_scaling": {"type": "llama3", **scaling}}
    new = {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        "dtype": "bfloat16",
    }
    wanted = RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    for keys in (old, oldest, new):
        config = parse(tmp_path, {**LLAMA, **keys})
        assert config.ropes == (wanted,) * 4
        assert config.dtype == "bfloat16"


def test_gemma_reads_its_two_rotary_bases_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    new = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    full = RopeConfig(kind="linear", theta=2e6, factor=8.0)
    sliding = RopeConfig(kind="default", theta=2e4)
    for keys in (old, new):
        config = parse(tmp_path, {**GEMMA3, **keys})
        assert config.ropes == (*[sliding] * 5, full, sliding)
        assert config.windows == (*[16] * 5, None, 16)


def test_eos_ids_come_from_both_files_without_repeats(tmp_path: Path) -> None:
    config = parse(tmp_path, {**LLAMA, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_ids == (2, 7, 9)
    assert parse(tmp_path, LLAMA, {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize(
    ("tree", "windows"),
    [
        ({**QWEN2, "sliding_window": 8, "max_window_layers": 2}, (None,) * 4),
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            (None, None, 8, 8),
        ),
        (
            {
                **QWEN3,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({**MISTRAL, "sliding_window": 8}, (8,) * 4),
        ({**MISTRAL, "sliding_window": None}, (None,) * 4),
        ({**LLAMA, "sliding_window": 8}, (None,) * 4),
    ],
)
def test_windows_follow_each_familys_own_rule(
    tmp_path: Path, tree: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse(tmp_path, tree).windows == windows


@pytest.mark.parametrize(
    ("tree", "config_class"),
    [
        (LLAMA, transformers.LlamaConfig),
        (MISTRAL, transformers.MistralConfig),
        (QWEN2, transformers.Qwen2Config),
        (QWEN3, transformers.Qwen3Config),
        (GEMMA3, transformers.Gemma3TextConfig),
    ],
)
def test_keys_left_out_mean_what_they_mean_to_transformers(
    tmp_path: Path, tree: dict[str, Any], config_class: type[Any]
) -> None:
    bare = {k: v for k, v in tree.items() if v is not None and k not in ("rms_norm_eps",)}
    theirs = config_class(**{k: v for k, v in bare.items() if k != "architectures"})
    ours = parse(tmp_path, bare)
    heads = theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    ropes = theirs.rope_parameters
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * len(ours.ropes)
    for kind, rope in zip(types, ours.ropes, strict=True):
        assert rope.theta == ropes.get(kind, ropes)["rope_theta"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "FooForCausalLM.*LlamaForCausalLM, Mistral.*Gemma3",
        ),
        ({"architectures": None}, "architectures is None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, wanted a divisor"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, wanted a divisor of hidden_size"),
        ({"head_dim": 7}, "head_dim is 7, wanted an even number"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', wanted a positive integer"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, wanted true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": [2]}, "rope_scaling is .*wanted an object"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters: rope_type is 'longrope'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor is 4, wanted less than high_freq_factor",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as error:
        parse(tmp_path, {**LLAMA, **change})
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "layer_types"),
        ({**GEMMA3, "layer_types": ["chunked_attention"] * 7}, "layer_types"),
        ({**GEMMA3, "hidden_activation": "silly"}, "hidden_activation"),
        (
            {**GEMMA3, "rope_parameters": {"rope_theta": 1e4}},
            "full_attention and sliding_attention",
        ),
        ({**MISTRAL, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({**QWEN2, "max_window_layers": "all"}, "max_window_layers"),
    ],
)
def test_a_familys_own_keys_are_checked_too(
    tmp_path: Path, tree: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(tmp_path, tree)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[]", "JSON object"), (None, "No such")]
)
def test_a_folder_without_a_readable_config_is_refused(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


def test_every_architecture_of_the_config_has_a_class() -> None:
    from mstar_tp.models.registry import MODELS

    assert tuple(MODELS) == architectures()


def test_importing_the_config_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mstar_tp.models.config.families; assert not {'torch', 'transformers'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
