"""Pins that the checker refuses exactly what a rank refuses, in the same words: every damage and
every refusal that other tests know is put to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_lora_damage
import test_lora_refusals
import torch
from support.adapter_kit import FULL_SPEC, Q0, Q1, SPEC, Q, load

from mstar_tp.common.errors import AdapterError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.format.checkpoint import survey_adapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import STANDARD, pair, q_pairs, random_pairs, write_adapter
from mstar_tp.tools.check.adapters import FileValidator, inspect_adapters
from mstar_tp.tools.check.base_model import ModelValidator
from mstar_tp.tools.check.findings import AdapterFindings
from mstar_tp.wire.values import AdapterKey

Cases = list[tuple[Any, ...]]


def pool_of(spec: LoraSpec) -> LoraAdapterPool:
    return LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=lambda report: None,
    )


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[bool, LoraAdapterPool]]:
    """Pools of ranks, with the ends of the model and without."""
    torch.set_num_threads(1)
    pools = {True: pool_of(FULL_SPEC), False: pool_of(SPEC)}
    yield pools
    for pool in pools.values():
        pool.close()


def rank_says(pool: LoraAdapterPool, path: Path) -> str | None:
    """Why a rank that starts refuses it, or None."""
    try:
        pool.loads.preload([(AdapterKey("x", 1), str(path))])
    except AdapterError as error:
        return str(error)
    raise AssertionError("served: give the pool its own test")


def findings_of(spec: LoraSpec | None, path: Path, *, digests: bool = False) -> AdapterFindings:
    validator = (
        FileValidator(max_rank=SPEC.max_rank, max_saved_rows=SPEC.max_saved_rows)
        if spec is None
        else ModelValidator({"": spec}, 2, torch.float32, None)
    )
    (findings,) = inspect_adapters(validator, [("x", str(path))], digests=digests)
    return findings


def cases_of(test: Any) -> Cases:
    """What a test of another file is parametrised with."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return list(mark.args[1])


NEEDS_BYTES = {"bytes: a NaN", "bytes: an infinity"}


def test_damage_is_refused_with_the_ranks_own_sentence_first(
    tmp_path: Path, pools: dict[bool, LoraAdapterPool]
) -> None:
    for number, (name, damage) in enumerate(test_lora_damage.DAMAGES.items()):
        folder = test_lora_damage.good(tmp_path / str(number))
        damage(folder)
        if name in NEEDS_BYTES:
            assert findings_of(FULL_SPEC, folder).servable, name
            with pytest.raises(AdapterError) as refused:
                load(folder, spec=FULL_SPEC)
            assert findings_of(FULL_SPEC, folder, digests=True).refusals == (str(refused.value),)
            assert not findings_of(None, folder, digests=True).servable
            continue
        findings = findings_of(FULL_SPEC, folder)
        assert findings.refusals[:1] == (rank_says(pools[True], folder),), name
        assert len(set(findings.refusals)) == len(findings.refusals)
        for text in findings.refusals:
            test_lora_damage.assert_readable(text, folder)


def test_what_cannot_be_served_is_refused_with_the_ranks_own_sentence_first(
    tmp_path: Path, pools: dict[bool, LoraAdapterPool]
) -> None:
    folders = []

    def case(tensors: dict[str, torch.Tensor], **config: Any) -> None:
        folders.append(write_adapter(tmp_path / str(len(folders)), tensors, **config))

    module = test_lora_refusals
    for config, _ in cases_of(module.test_a_setting_that_cannot_be_honoured_is_named):
        case(q_pairs(SPEC), **config)
    for config, _ in cases_of(module.test_tensors_that_peft_would_not_load_are_refused):
        case(q_pairs(SPEC), **config)
    for key, shape, _ in cases_of(module.test_a_tensor_that_nothing_takes_is_named):
        case(q_pairs(SPEC) | {key: torch.ones(shape)})
    for name, size_in, size_out in cases_of(
        module.test_an_adapter_of_another_width_is_refused_even_at_a_shards_size
    ):
        case(pair(STANDARD.format(layer=0, module=name), size_in, size_out))
    for index in cases_of(module.test_a_layer_the_base_has_not_is_refused):
        layer = f"base_model.model.model.layers.{index}.{Q}"
        case(q_pairs(SPEC) | pair(layer, 8, 8))
    case(pair(Q0, 8, 8, rank=5), r=5)
    case(pair(Q0, 8, 8) | pair(f"layers.0.{Q}", 8, 8))
    case({})
    assert len(folders) > 60
    for folder in folders:
        findings = findings_of(SPEC, folder)
        assert findings.refusals[:1] == (rank_says(pools[False], folder),), folder


def test_what_is_served_is_found_fine_with_its_digest(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, random_pairs(SPEC, rank=2, seed=0))
    findings = findings_of(SPEC, folder, digests=True)
    assert findings.servable and findings.digest == load(folder).digest
    for rank in (0, 1):
        copy = load(folder, rank=rank, world_size=2)
        assert findings.host_bytes is not None and findings.host_bytes[rank] == copy.num_bytes


def test_every_reason_is_found_and_none_twice(tmp_path: Path) -> None:
    tensors = q_pairs(SPEC) | pair(STANDARD.format(layer=1, module="mlp.up_proj"), 8, 9)
    del tensors[f"{Q1}.lora_A.weight"]
    folder = write_adapter(
        tmp_path, tensors, use_dora=True, a_new_setting=1, lora_alpha="16", bias="all"
    )
    told = findings_of(SPEC, folder).refusals
    config = f"adapter 'x': {folder / 'adapter_config.json'}: "
    assert [text.removeprefix(config).partition(" is ")[0] for text in told[:4]] == [
        "use_dora",
        "'a_new_setting'",
        "bias",
        "lora_alpha",
    ]
    assert f"{Q1}.lora_A.weight is missing" in told[4] and len(told) == 5
    good = write_adapter(tmp_path / "y", tensors | {"score.weight": torch.ones(2, 2)}, r=3)
    text = "\n".join(findings_of(SPEC, good).refusals)
    for wanted in ("score.weight", f"{Q0}.lora_A", f"{Q0}.lora_B", "lora_A.weight is missing"):
        assert wanted in text
    assert "[9, 2], wanted [16, 3]" in text


def test_a_broken_header_does_not_hide_the_settings(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_pairs(SPEC), use_dora=True, r=0)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    told = findings_of(SPEC, folder).refusals
    assert len(told) == 3
    assert "truncated" in told[0] and "use_dora" in told[1] and " r is 0" in told[2]


def test_a_survey_stops_at_its_limit(tmp_path: Path) -> None:
    tensors = {f"stray.{number}": torch.ones(1) for number in range(30)}
    folder = write_adapter(tmp_path, q_pairs(SPEC) | tensors)
    for limit in (1, 7, 200):
        told = survey_adapter(lambda headers: SPEC, "x", folder, limit=limit).refusals
        assert len(told) == min(limit, 30)


# ----------------------------------------------------------------------------- without a model


def test_a_file_alone_is_judged_by_what_it_says_itself(tmp_path: Path) -> None:
    served = write_adapter(tmp_path / "served", random_pairs(SPEC, rank=2, seed=0))
    alone, placed = findings_of(None, served), findings_of(SPEC, served)
    assert alone.servable and alone.host_bytes is None
    assert {(t.name, t.layers, t.ranks) for t in alone.targets} == {
        (t.name, t.layers, t.ranks) for t in placed.targets
    }
    assert (alone.ranks, alone.scalings, alone.dtypes) == ((2,), (2.0,), ("F32",))
    refused = write_adapter(tmp_path / "refused", q_pairs(SPEC), rank_pattern={"q_proj": 3})
    assert "[2, 8], wanted [3, 8]" in findings_of(None, refused).refusals[0]
    half = q_pairs(SPEC)
    del half[f"{Q1}.lora_A.weight"]
    assert "is missing" in findings_of(None, write_adapter(tmp_path / "half", half)).refusals[0]


def test_a_file_alone_is_refused_only_if_a_model_of_its_shapes_refuses_it(tmp_path: Path) -> None:
    """Saved norms and rows, trained tokens, Kohya words, layers of several sizes."""
    norm = {"base_model.model.model.norm.weight": torch.ones(8)}
    embed = {"base_model.model.model.embed_tokens.weight": torch.ones(32, 8)}
    tokens = {
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 8)
    }
    conv = {
        "vision_tower.patch_embedding.lora_A.weight": torch.ones(2, 3, 4, 4),
        "vision_tower.patch_embedding.lora_B.weight": torch.ones(8, 2, 1, 1),
    }
    fine = [
        write_adapter(tmp_path / "norm", q_pairs(SPEC) | norm, modules_to_save=["norm"]),
        write_adapter(tmp_path / "embed", q_pairs(SPEC) | embed, modules_to_save=["embed_tokens"]),
        write_adapter(tmp_path / "token", q_pairs(SPEC) | tokens, trainable_token_indices=[3, 5]),
        write_adapter(tmp_path / "sizes", pair(Q0, 8, 8) | pair(Q1, 16, 4)),
        write_adapter(tmp_path / "nodes", pair(Q0, 8, 8) | pair(f"tower.layers.0.{Q}", 6, 6)),
        write_adapter(tmp_path / "patch", conv),
    ]
    kohya = write_adapter(
        tmp_path / "kohya",
        {
            "lora_te_model_layers_0_self_attn_q_proj.lora_down.weight": torch.ones(2, 8),
            "lora_te_model_layers_0_self_attn_q_proj.lora_up.weight": torch.ones(8, 2),
            "lora_te_model_layers_0_self_attn_q_proj.alpha": torch.tensor(4.0),
        },
    )
    (kohya / "adapter_config.json").unlink()
    for folder in (*fine, kohya):
        findings = findings_of(None, folder, digests=True)
        assert findings.refusals == (), folder
    findings = findings_of(None, kohya)
    assert (findings.format, findings.scalings, findings.alphas) == ("Kohya", (2.0,), ())
    many = replace(SPEC, max_saved_rows=8)
    validator = FileValidator(max_rank=4, max_saved_rows=many.max_saved_rows)
    (found,) = inspect_adapters(validator, [("x", str(fine[1]))])
    assert "--max-lora-saved-rows" in found.refusals[0]
