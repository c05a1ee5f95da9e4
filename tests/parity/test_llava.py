"""Promise: a model that reads images says what transformers' own and PEFT say, however prompts are
cut and whatever adapters share a step.

Float32 and random weights on both sides; images stand where the processor puts them, and a chunk
may end inside one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.llava_kit import NUM_DECODED, PARAMS, Case, assert_close, base_model, expect
from support.lockstep_ranks import LockstepRanks
from support.merge_kit import merged
from support.peft_kit import logits_of
from support.tiny_llava import TARGETS, make_llava_adapter, make_tiny_llava

from mstar_tp.common.errors import AdapterError
from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.engine.resources.lora.binding import module_lora_spec
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import load_model
from mstar_tp.models.registry import MODELS, rules_of
from mstar_tp.testing.lora_files import pair, write_adapter
from mstar_tp.tools.check.adapters import FileValidator, inspect_adapters
from mstar_tp.tools.check.base_model import plan_model, validator_of
from mstar_tp.tools.convert.convert_command import ConvertOptions, convert
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llava(tmp_path_factory.mktemp("llava"), 3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return base_model(folder)


def run(ranks: LockstepRanks, cases: list[Case], chunk: int) -> None:
    """Every case's prompt ``chunk`` tokens a step, all in one batch, then its decode rows."""
    rids = []
    for case in cases:
        key = None if case.name is None else AdapterKey(case.name, FIRST_GENERATION)
        rids.append(ranks.open(case.prompt, PARAMS, key, case.images))
        assert key is None or ranks.wait_copies(rids[-1]) is None
    seen: dict[int, list[torch.Tensor]] = {rid: [] for rid in rids}
    requests = ranks.engines[0].requests
    while rows := [
        (rid, min(chunk, requests[rid].pending)) for rid in rids if len(seen[rid]) < NUM_DECODED
    ]:
        for rid, sampled in ranks.step(rows)[0].sampled.items():
            seen[rid].append(logits_of(sampled))
    for rid, case in zip(rids, cases, strict=True):
        for position, wanted in enumerate(case.logits):
            assert_close(seen[rid][position], wanted, f"{case.name} {case.parts}, token {position}")
        assert not any(engine.requests[rid].encoded for engine in ranks.engines)
        ranks.remove(rid)


@pytest.fixture(params=[1, 2])
def ranks(folder: Path, request: pytest.FixtureRequest) -> Iterator[LockstepRanks]:
    ranks = LockstepRanks(
        EngineConfig(
            model=str(folder),
            tensor_parallel_size=request.param,
            dtype="float32",
            threads=1,
            max_model_len=64,
            block_size=4,
            kv_offloading_size=0.01,
        )
    )
    yield ranks
    ranks.close()


def test_images_and_text_in_one_batch_are_what_they_are_alone(
    folder: Path, reference: Any, ranks: LockstepRanks
) -> None:
    cases = [
        Case([5, "a", 3]),
        Case([9]),
        Case(["b", 1, "a", "c"]),
        Case([2, "c", "c", 4, "a", 2]),
    ]
    expect(cases, reference, folder)
    run(ranks, cases, 64)
    # Chunks that end inside an image, at its end, and one token at a time.
    for chunk in (7, 4, 1):
        run(ranks, cases, chunk)


def test_a_preempted_request_encodes_its_images_again(
    folder: Path, reference: Any, ranks: LockstepRanks
) -> None:
    case = Case([2, "a", 3, "b", 4])
    expect([case], reference, folder)
    rid = ranks.open(case.prompt, PARAMS, images=case.images)
    ranks.step([(rid, 4)])
    assert list(ranks.engines[0].requests[rid].encoded) == [0]
    for state in ranks.states:
        state.preempt(rid)
    assert not ranks.engines[0].requests[rid].encoded
    ranks.step([(rid, 11)])
    last = ranks.step([(rid, len(case.prompt) - 11)])[0].sampled[rid]
    assert_close(logits_of(last), case.logits[0], "after a preemption")
    ranks.remove(rid)


def test_one_whose_kv_moved_to_host_memory_goes_on_inside_its_image(
    folder: Path, reference: Any, ranks: LockstepRanks
) -> None:
    case = Case([2, "a", 3, "b", 4])
    expect([case], reference, folder)
    rid = ranks.open(case.prompt, PARAMS, images=case.images)
    ranks.step([(rid, 4)])
    ranks.offload(rid)
    ranks.step([(rid, 7)])
    last = ranks.step([(rid, len(case.prompt) - 11)])[0].sampled[rid]
    assert_close(logits_of(last), case.logits[0], "after it was offloaded")
    ranks.remove(rid)


ADAPTERS: dict[str, tuple[str, ...]] = {
    "all": TARGETS,
    "tower": ("patch_embedding", "encoder.layers.1.self_attn.q_proj", "out_proj", "fc1", "fc2"),
    "projector": ("linear_1", "linear_2"),
    "decoder": ("o_proj", "gate_proj", "down_proj"),
}


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    settings: dict[str, dict[str, Any]] = {
        "all": {"rank_pattern": {"patch_embedding": 6, "fc1": 2}, "lora_bias": True},
        "tower": {"use_rslora": True},
        # PEFT calls its layers model.language_model.layers: only the second pattern is of one.
        "decoder": {
            "alpha_pattern": {
                "model.layers.0.self_attn.o_proj": 64,
                "language_model.layers.1.mlp.down_proj": 1,
            }
        },
    }
    made = {
        name: make_llava_adapter(
            place / name, folder, 3 + seed, targets, seed, **settings.get(name, {})
        )
        for seed, (name, targets) in enumerate(ADAPTERS.items())
    }
    made["old"] = place / "old"
    rewrite(made["all"], made["old"], _as_transformers_4)
    return made


def rewrite(source: Path, out: Path, rename: Callable[[str], str]) -> None:
    """The same adapter with other keys."""
    out.mkdir()
    (out / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    stored = load_file(source / "adapter_model.safetensors")
    renamed = {rename(key): tensor for key, tensor in stored.items()}
    assert set(renamed) != set(stored)
    save_file(renamed, out / "adapter_model.safetensors")


def _as_transformers_4(key: str) -> str:
    key = key.replace("model.model.vision_tower.", "model.vision_tower.vision_model.")
    key = key.replace("model.model.multi_modal_projector.", "model.multi_modal_projector.")
    return key.replace("model.model.language_model.", "model.language_model.model.")


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapters_of_every_node_share_steps_with_each_other_and_the_base(
    folder: Path, reference: Any, tuned: dict[str, Path], world_size: int
) -> None:
    import peft

    parts = (["a", 3, "b"], [4], [2, "c", 3])
    cases = [Case(p, name) for name in (*tuned, None) for p in parts]
    for name in (*ADAPTERS, None):
        model = copy.deepcopy(reference)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, str(tuned[name])).eval()
        expect([case for case in cases if case.name == name], model, folder)
    for case, same in zip(
        *([c for c in cases if c.name == n] for n in ("old", "all")), strict=True
    ):
        case.fed, case.logits = same.fed, same.logits
    base = {str(case.parts): case.logits[0] for case in cases if case.name is None}
    for case in cases:
        wanted = case.name in ("all", "old", "decoder") or (case.images and case.name is not None)
        moved = float((case.logits[0] - base[str(case.parts)]).abs().max())
        assert (moved > 0.01) == bool(wanted), (case.name, case.parts)
    ranks = LockstepRanks(
        EngineConfig(
            model=str(folder),
            tensor_parallel_size=world_size,
            dtype="float32",
            threads=1,
            max_model_len=64,
            block_size=4,
            lora=LoraConfig(
                adapters={name: str(path) for name, path in tuned.items()},
                max_loras=len(tuned),
                max_lora_rank=8,
            ),
        )
    )
    try:
        for chunk in (64, 5):
            run(ranks, cases, chunk)
        lora = ranks.engines[0].lora
        assert lora is not None and [p.stage.name for p in lora.pools] == ["vision", "language"]
        all_of_it, old, tower = (
            [pool.tables.copies.agreed(AdapterKey(name, FIRST_GENERATION)) for pool in lora.pools]
            for name in ("all", "old", "tower")
        )
        assert None not in all_of_it and all_of_it == old
        assert tower[0] is not None and tower[1] is None
    finally:
        ranks.close()


def test_a_merged_model_is_pefts(
    folder: Path, reference: Any, tuned: dict[str, Path], tmp_path: Path
) -> None:
    import peft

    for name in ("tower", "projector", "decoder"):
        mine = base_model(merged(folder, [tuned[name]], tmp_path / name)).state_dict()
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), str(tuned[name]))
        for key, tensor in theirs.merge_and_unload().state_dict().items():
            assert torch.equal(mine[key], tensor), (name, key)


def test_peft_takes_a_converted_adapter_for_what_it_was(
    folder: Path, reference: Any, tuned: dict[str, Path], tmp_path: Path
) -> None:
    import peft

    before, after = Case(["a", 3]), Case(["a", 3])
    options = ConvertOptions(source=tuned["old"], out=tmp_path / "out", model=folder, force=False)
    convert(options)
    for case, path in ((before, tuned["all"]), (after, options.out)):
        model = peft.PeftModel.from_pretrained(copy.deepcopy(reference), str(path)).eval()
        expect([case], model, folder)
    assert torch.equal(before.logits[0], after.logits[0])


@pytest.mark.parametrize(
    ("module", "tensors", "said"),
    [
        (
            "vision_tower.embeddings.position_embedding",
            {"lora_embedding_A": (2, 5), "lora_embedding_B": (32, 2)},
            "position_embedding",
        ),
        (
            "vision_tower.encoder.layers.3.mlp.fc1",
            {"lora_A.weight": (2, 32), "lora_B.weight": (48, 2)},
            "has 3 layers",
        ),
        (
            "vision_tower.embeddings.patch_embedding",
            {"lora_A.weight": (2, 588), "lora_B.weight": (32, 2)},
            r"wanted \[2, 3, 14, 14\]",
        ),
        (
            "vision_tower.pre_layrnorm",
            {"weight": (32,)},
            "pre_layrnorm",
        ),
    ],
)
def test_what_no_node_serves_refuses_the_adapter_by_name(
    folder: Path, tmp_path: Path, module: str, tensors: dict[str, Any], said: str
) -> None:
    config = load_model_config(folder)
    place = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("cpu"))
    model = MODELS[config.architecture](config, place, 8)
    vision, language = (
        module_lora_spec(
            stage.root,
            rules_of(config.architecture),
            rows=stage.rows,
            slots=1,
            max_rank=4,
            cpu_capacity=1,
            dtype="float32",
        )
        for stage in model.lora_stages()
    )
    stored = {
        f"base_model.model.model.{module}.{name}": torch.ones(shape)
        for name, shape in tensors.items()
    }
    stored |= pair("base_model.model.model.multi_modal_projector.linear_2", 64, 64)
    saved = [module.rpartition(".")[2]] if "weight" in tensors else None
    write_adapter(tmp_path, stored, modules_to_save=saved)
    for spec, other in ((vision, language), (language, vision)):
        with pytest.raises(AdapterError, match=said):
            check_adapter_file(spec, "x", tmp_path, [other])


def test_inspect_finds_every_node_of_an_adapter_and_its_size_on_each_rank(
    folder: Path, tuned: dict[str, Path]
) -> None:
    engine = EngineConfig(model=str(folder), tensor_parallel_size=2, dtype="float32")
    validator = validator_of(plan_model(engine), str(folder), LoraConfig(max_lora_rank=8))
    adapters = [(name, str(path)) for name, path in tuned.items()]
    found = {
        findings.name: findings for findings in inspect_adapters(validator, adapters, digests=True)
    }
    assert all(findings.servable for findings in found.values())
    parts = {name: str(findings.digest).count("=") for name, findings in found.items()}
    assert parts["all"] == 2 and parts["tower"] == parts["decoder"] == 1
    whole, tower, decoder = (found[name].host_bytes for name in ("all", "tower", "decoder"))
    assert whole and tower and decoder and min(whole) > max(tower) + max(decoder)
    alone = FileValidator(max_rank=8, max_saved_rows=64)
    for findings in inspect_adapters(alone, adapters):
        assert findings.servable
        names = {(target.name.rpartition(".")[2], target.layers) for target in findings.targets}
        placed = found[findings.name].targets
        assert names == {(t.name.rpartition(".")[2], t.layers) for t in placed}


@pytest.mark.parametrize(
    "overrides",
    [
        {"vision_feature_select_strategy": "full"},
        {"vision_feature_layer": -1, "projector_hidden_act": "gelu_pytorch_tanh"},
        {"vision_feature_layer": 1, "multimodal_projector_bias": False},
    ],
    ids=["class token kept", "last layer", "inner layer"],
)
def test_what_a_config_says_of_the_tower_is_followed(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    make_tiny_llava(tmp_path, 4, **overrides)
    config = load_model_config(tmp_path)
    model = load_model(tmp_path, config, SingleGroup(), torch.float32, torch.device("cpu"))
    theirs = base_model(tmp_path)
    case = Case(["a", "b"])
    assert case.pixels is not None and config.vision is not None
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in (config.vision.pixels.mean, config.vision.pixels.std)
    )
    with torch.no_grad():
        wanted = theirs.get_image_features(
            (case.pixels / 255 - mean) / std,
            vision_feature_layer=theirs.config.vision_feature_layer,
            vision_feature_select_strategy=theirs.config.vision_feature_select_strategy,
        ).pooler_output
        got = model.encode_images(case.pixels)  # type: ignore[operator]
    assert got.shape[1] == config.vision.tokens_per_image
    assert_close(got, torch.stack(list(wanted)), str(overrides))


def _respelled(key: str, newer: bool) -> str:
    """A stored key as the first LLaVAs were saved, or as the model's own modules are called."""
    if key.startswith("vision_tower."):
        tail = key.removeprefix("vision_tower.").removeprefix("vision_model.")
        return f"model.vision_tower.{tail}" if newer else f"vision_tower.vision_model.{tail}"
    if not newer:
        return key
    key = key.replace("language_model.lm_head", "lm_head")
    key = key.replace("language_model.model.", "model.language_model.")
    return f"model.{key}" if key.startswith("multi_modal") else key


@pytest.mark.parametrize("newer", [False, True])
def test_checkpoints_of_every_spelling_give_the_same_model(
    folder: Path, tmp_path: Path, newer: bool
) -> None:
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    renamed = {_respelled(key, newer): tensor for key, tensor in stored.items()}
    assert set(renamed) != set(stored)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    case, config = Case(["a"]), load_model_config(folder)
    got, wanted = (
        load_model(where, config, SingleGroup(), torch.float32, torch.device("cpu"))
        for where in (tmp_path, folder)
    )
    assert torch.equal(got.encode_images(case.pixels), wanted.encode_images(case.pixels))  # type: ignore[operator]
    ids = torch.arange(9)
    assert torch.equal(got.model.embed_tokens(ids), wanted.model.embed_tokens(ids))
