"""Every setting that PEFT knows is honoured, known to be without effect, or refused by name; and a
config means here what it means to PEFT, however it is written.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists
from support.adapter_kit import Q0, SPEC, load, refusal

from mstar_tp.common.problems import Problems
from mstar_tp.lora.format.peft_config import PeftConfig, parse_peft_config
from mstar_tp.testing.lora_files import q_pairs, write_adapter

CONFIG = "adapter_config.json"
HONOURED = {
    "r": 3, "lora_alpha": 5, "use_rslora": True, "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"q_proj": 3}, "target_modules": ["v_proj"], "exclude_modules": ["k_proj"],
    "layers_to_transform": [1], "layers_pattern": "h", "lora_bias": True,
    "modules_to_save": ["norm"], "trainable_token_indices": [1], "ensure_weight_tying": True,
    "fan_in_fan_out": True, "target_parameters": ["mlp.experts.down_proj"],
}  # fmt: skip
"""Settings that change what the config is taken for, with a value that shows it."""
WITHOUT_EFFECT = {
    "task_type": "FEATURE_EXTRACTION", "auto_mapping": {"parent_library": "x"},
    "peft_version": "9.9", "base_model_name_or_path": "some/where", "revision": "main",
    "inference_mode": True, "lora_dropout": 0.9, "megatron_config": {"a": 1},
    "megatron_core": "other", "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0},
    "corda_config": {"verbose": True}, "lora_ga_config": {"scale": "unit"},
    "velora_config": {"scale": 1.0}, "qalora_group_size": 32,
    "runtime_config": {"ephemeral_gpu_offload": True},
}  # fmt: skip
REFUSED = {
    "peft_type": "VERA", "bias": "all", "init_lora_weights": "pissa", "use_dora": True,
    "alora_invocation_tokens": [1], "use_qalora": True, "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 1]],
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1.0},
}  # fmt: skip


def plain(**settings: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}


def parsed(tree: dict[str, Any]) -> PeftConfig:
    config = parse_peft_config(tree, Problems(), where="x")
    assert config is not None
    return config


def meaning(tree: dict[str, Any]) -> dict[str, Any]:
    """What a config is taken for, the patterns by what they say of q_proj."""
    config = parsed(tree)
    tables = ("rank_pattern", "alpha_pattern")
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    found = {name: fields[name].get("q_proj") for name in tables}
    return fields | found


def test_each_of_pefts_settings_is_honoured_without_effect_or_refused(tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    listed = [*HONOURED, *WITHOUT_EFFECT, *REFUSED]
    assert sorted(listed) == sorted(fields), "PEFT has other settings than are listed here"
    base = meaning(plain())
    for key, value in HONOURED.items():
        assert meaning(plain(**{key: value})) != base, key
    for key, value in WITHOUT_EFFECT.items():
        assert meaning(plain(**{key: value})) == base, key
    for number, (key, value) in enumerate(REFUSED.items()):
        text = refusal(write_adapter(tmp_path / str(number), q_pairs(SPEC), **{key: value}))
        assert f"{key} is " in text and CONFIG in text, text
        what_to_do = "merge_and_unload" in text or "save_pretrained" in text
        assert what_to_do == (key != "alora_invocation_tokens"), text


def test_the_config_that_peft_writes_by_default_is_plain_lora(tmp_path: Path) -> None:
    peft.LoraConfig(r=2, lora_alpha=4).save_pretrained(str(tmp_path))
    tree = json.loads((tmp_path / CONFIG).read_text())
    assert meaning(tree) == meaning(plain())


@pytest.mark.parametrize(
    "key", ["alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config"]
)
def test_what_acts_in_peft_even_when_empty_is_refused(tmp_path: Path, key: str) -> None:
    """An empty mapping is a config of defaults; no tokens at all never invoke the adapter."""
    value: Any = [] if key == "alora_invocation_tokens" else {}
    assert f"{key} is {value}" in refusal(write_adapter(tmp_path, q_pairs(SPEC), **{key: value}))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("a_new_one", "is not known here"),
        ("PISSA_niter_x", "is not known here"),
        ("loftq", "changes the base model"),
        ("PiSSA", "path_initial_model_for_weight_conversion"),
        (3, "wanted true, false or a name"),
        (["pissa"], "wanted true, false or a name"),
    ],
)
def test_an_initialisation_is_refused_for_what_it_is(
    tmp_path: Path, value: Any, named: str
) -> None:
    text = refusal(write_adapter(tmp_path, q_pairs(SPEC), init_lora_weights=value))
    assert "init_lora_weights" in text and named in text


@pytest.mark.parametrize("setting", ["modules_to_tie", "target_modules_to_tie"])
def test_what_peft_keeps_in_memory_only_is_refused_in_a_file(tmp_path: Path, setting: str) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC), **{setting: ["lm_head"]})
    assert setting in refusal(folder)
    assert load(write_adapter(tmp_path, q_pairs(SPEC), **{setting: None})).b


MODULES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.0.up_proj",
    "model.layers.0.mlp.experts.1.up_proj",
    "lm_head",
]
SELECTIONS: list[dict[str, Any]] = [
    {"exclude_modules": exclude, "layers_to_transform": layers, "layers_pattern": pattern}
    for exclude in (None, [], ["q_proj"], ["j"], ["layers.1.mlp.experts.0.up_proj"], r".*\.0\..*")
    for layers in (None, [], 0, 1, [0, 1], [7])
    for pattern in (None, "", [], "layers", ["h", "layers"], "h", "experts", ["experts", "layers"])
    if layers is not None or not pattern
]


@pytest.mark.parametrize("targets", [["q_proj", "up_proj", "lm_head"], MODULES])
def test_modules_are_left_out_as_peft_leaves_them_out(targets: list[str]) -> None:
    for settings in SELECTIONS:
        ours = parsed(plain(target_modules=targets, **settings))
        theirs = peft.LoraConfig(target_modules=targets, **settings)
        for module in MODULES:
            found = bool(check_target_module_exists(theirs, module))
            assert (ours.why_excluded((module,), module) is None) == found, (settings, module)


def test_a_stack_of_another_name_is_refused_by_the_setting(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC), layers_to_transform=[0], layers_pattern="h")
    assert "layers_pattern names no stack" in refusal(folder)
    assert "layers_pattern" in refusal(write_adapter(tmp_path, q_pairs(SPEC), layers_pattern=3))


@pytest.mark.parametrize("form", ["byte order mark", "CRLF", "blanks"])
def test_a_config_is_read_however_an_editor_saved_it(tmp_path: Path, form: str) -> None:
    config = write_adapter(tmp_path, q_pairs(SPEC), alpha_pattern={"q_proj": 3}) / CONFIG
    text = json.dumps(json.loads(config.read_text()), indent=2)
    wanted = load(tmp_path).digest
    config.write_bytes(
        {
            "byte order mark": b"\xef\xbb\xbf" + text.encode(),
            "CRLF": text.replace("\n", "\r\n").encode(),
            "blanks": b"\n\n\t" + text.encode() + b"\n\n",
        }[form]
    )
    assert load(tmp_path).digest == wanted


def test_a_setting_that_is_written_twice_is_refused(tmp_path: Path) -> None:
    config = write_adapter(tmp_path, q_pairs(SPEC)) / CONFIG
    config.write_text(config.read_text().replace('"r": 2', '"r": 4, "r": 2'))
    text = refusal(tmp_path)
    assert str(config) in text and "names 'r' twice" in text


def test_values_nested_a_thousand_deep_are_refused_in_a_short_line(tmp_path: Path) -> None:
    """Shallow enough to be parsed, too deep to be printed whole."""
    config = write_adapter(tmp_path, q_pairs(SPEC)) / CONFIG
    text = config.read_text()
    for depth in (100, *range(850, 1000)):
        config.write_text(text.replace('"r": 2', f'"r": {"[" * depth}{"]" * depth}'))
        found = refusal(tmp_path)
        assert str(config) in found and len(found) < 500


def test_a_pattern_for_every_module_is_no_regex_to_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling them took half a millisecond each, with the interpreter held."""

    def never(pattern: str) -> Any:
        raise AssertionError(f"{pattern} was parsed")

    monkeypatch.setattr("mstar_tp.lora.format.patterns._matcher", never)
    names = {f"model.layers.{n}.self_attn.q_proj": 2 for n in range(20_000)}
    names |= {name.replace(".", r"\."): rank for name, rank in names.items()}
    assert load(write_adapter(tmp_path, q_pairs(SPEC), rank_pattern=names)).lora_rank == 2


def test_a_tensor_of_three_dims_is_no_matrix(tmp_path: Path) -> None:
    tensors = q_pairs(SPEC)
    key = f"{Q0}.lora_A.weight"
    tensors[key] = tensors[key].reshape(2, 4, 2)
    text = refusal(write_adapter(tmp_path, tensors))
    assert key in text and "[2, 4, 2]" in text
