"""Promise: a model that reads images says what transformers' own says, however prompts are cut.

Float32 and random weights on both sides; images stand where the processor puts them, and a chunk
may end inside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llava_kit import NUM_DECODED, PARAMS, Case, assert_close, base_model, expect
from peft_kit import logits_of
from safetensors.torch import load_file, save_file

from mstar_tp.config import EngineConfig
from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.models.config import load_model_config
from mstar_tp.models.loader import load_model
from mstar_tp.testing.lockstep import LockstepRanks
from mstar_tp.testing.tiny_llava import make_tiny_llava

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llava(tmp_path_factory.mktemp("llava"), 3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return base_model(folder)


def run(ranks: LockstepRanks, cases: list[Case], chunk: int) -> None:
    """Every case's prompt ``chunk`` tokens a step, all in one batch, then its decode rows."""
    rids = [ranks.open(case.prompt, PARAMS, images=case.images) for case in cases]
    seen: dict[int, list[torch.Tensor]] = {rid: [] for rid in rids}
    requests = ranks.engines[0].requests
    while rows := [
        (rid, min(chunk, requests[rid].pending)) for rid in rids if len(seen[rid]) < NUM_DECODED
    ]:
        for rid, sampled in ranks.step(rows)[0].sampled.items():
            seen[rid].append(logits_of(sampled))
    for rid, case in zip(rids, cases, strict=True):
        for position, wanted in enumerate(case.logits):
            assert_close(seen[rid][position], wanted, f"{case.parts}, token {position}")
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
