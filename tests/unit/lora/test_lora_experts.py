"""Promise: an expert's delta goes to the rows that its router sent and whose slot has an adapter,
each with its own slot's factors, and a row's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar_tp.common.errors import AdapterError, ConfigError
from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.engine.resources.lora.binding import module_lora_spec
from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.device.expert_weights import ExpertWeights, adapter_pairs
from mstar_tp.lora.format.checkpoint import check_adapter_file, survey_adapter
from mstar_tp.lora.reading.shards import read_adapter, slot_shapes
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.registry import MODELS, rules_of
from mstar_tp.testing.lora_files import write_adapter
from mstar_tp.testing.tiny_models import Family, make_tiny_model
from mstar_tp.tools.check.file_alone import spec_alone
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

EXPERTS, SLOTS, RANK, IN, OUT = 5, 3, 4, 24, 38
Tensors = dict[str, torch.Tensor]


@dataclass
class Storage:
    """Slots of one linear of two slices; the second slot has no adapter here."""

    max_rank: int
    a_NLMI: torch.Tensor  # noqa: N815
    b_NLKO: torch.Tensor  # noqa: N815
    bias_NLO: torch.Tensor  # noqa: N815
    ranks_of: list[int]
    ranks_L: torch.Tensor  # noqa: N815
    slices: list[slice]
    slice_ends: torch.Tensor


def storage() -> Storage:
    generator = torch.Generator().manual_seed(0)
    ranks = [RANK, 0, 2]
    return Storage(
        max_rank=RANK,
        a_NLMI=torch.randn(EXPERTS, SLOTS, 2 * RANK, IN, generator=generator),
        b_NLKO=torch.randn(EXPERTS, SLOTS, RANK, OUT, generator=generator),
        bias_NLO=torch.randn(EXPERTS, SLOTS, OUT, generator=generator),
        ranks_of=ranks,
        ranks_L=torch.tensor(ranks),
        slices=[slice(0, 20), slice(20, OUT)],
        slice_ends=torch.tensor([20, OUT]),
    )


def by_hand(held: Storage, slot: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The delta of one row."""
    out = torch.zeros(OUT)
    rank = held.ranks_of[slot - 1] if slot else 0
    for index, columns in enumerate(held.slices):
        a = held.a_NLMI[expert, slot - 1, index * RANK :][:rank]
        out[columns] = held.b_NLKO[expert, slot - 1, :rank, columns].t() @ (a @ x)
    return out


@pytest.mark.parametrize("with_kernel", [True, False])
def test_each_row_takes_its_own_slots_and_experts_factors(with_kernel: bool) -> None:
    held = storage()
    kernels = cpu_kernels(torch.device("cpu"), torch.float32) if with_kernel else None
    if with_kernel and kernels is None:
        pytest.skip("no compiler here")
    weights = ExpertWeights(held, kernels)
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([1, 0, 3, 2, 1, 1, 0, 3, 3])
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in slots])
    places = torch.randperm(2 * len(slots), generator=generator).view(-1, 2)
    x, y = (torch.randn(2 * len(slots), size, generator=generator) for size in (IN, OUT))
    pairs = adapter_pairs(slots, experts, places, SLOTS)
    assert pairs is not None
    got = y.clone()
    weights.add(got, x, pairs)
    biased = y.clone()
    weights.add_bias(biased, pairs)
    for token, slot in enumerate(slots.tolist()):
        for expert, row in zip(experts[token].tolist(), places[token].tolist(), strict=True):
            wanted = y[row] + by_hand(held, slot, expert, x[row])
            assert torch.allclose(got[row], wanted, rtol=1e-5, atol=1e-5)
            bias = held.bias_NLO[expert, slot - 1] if slot else 0.0
            assert torch.equal(biased[row], y[row] + bias)
            if not slot or not held.ranks_of[slot - 1]:
                assert torch.equal(got[row], y[row])
    if with_kernel:
        for token in (0, 2):
            alone = adapter_pairs(
                slots[token : token + 1],
                experts[token : token + 1],
                places[token : token + 1],
                SLOTS,
            )
            assert alone is not None
            again = y.clone()
            weights.add(again, x, alone)
            assert torch.equal(again[places[token]], got[places[token]])
    assert adapter_pairs(torch.zeros(9, dtype=torch.int64), experts, places, SLOTS) is None


def spec_of(folder: Path, family: Family, **settings: Any) -> LoraSpec:
    make_tiny_model(folder / "base", family, **settings)
    config = load_model_config(folder / "base")
    place = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("meta"))
    return module_lora_spec(
        MODELS[config.architecture](config, place, 8),
        rules_of(config.architecture),
        slots=2,
        max_rank=4,
        cpu_capacity=2,
        dtype="float32",
    )


def digest(spec: LoraSpec, path: Path) -> str:
    file = check_adapter_file(spec, "a", path)
    key = AdapterKey("a", FIRST_GENERATION)
    loaded = read_adapter(
        spec, key, file, rank=0, world_size=1, dtype=torch.float32, page_locked=False
    )
    return loaded.digest


DOWN = "base_model.model.model.layers.0.mlp.experts"


def stacked_down(rank: int = 2) -> Tensors:
    """Of the tiny Qwen3-MoE: 6 experts, inner size 40, hidden size 64."""
    generator = torch.Generator().manual_seed(2)
    a, b = (
        torch.randn(6 * rank, 40, generator=generator),
        torch.randn(64, rank * 6, generator=generator),
    )
    return {f"{DOWN}.lora_A.weight": a, f"{DOWN}.lora_B.weight": b}


def each_down(rank: int = 2) -> Tensors:
    """The same, expert by expert."""
    a, b = stacked_down(rank).values()
    tensors = {}
    for e in range(6):
        tensors[f"{DOWN}.{e}.down_proj.lora_A.weight"] = a[e * rank : (e + 1) * rank]
        tensors[f"{DOWN}.{e}.down_proj.lora_B.weight"] = b[:, e::6]
    return tensors


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


STACKED: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}


def test_stacked_and_single_factors_of_one_adapter_have_one_digest(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen3_moe")
    stacked = write_adapter(tmp_path / "stacked", stacked_down(), **STACKED)
    single = write_adapter(tmp_path / "single", each_down())
    changed = each_down()
    changed[f"{DOWN}.5.down_proj.lora_B.weight"][0, 0] += 1
    other = write_adapter(tmp_path / "other", changed)
    assert digest(spec, stacked) == digest(spec, single) != digest(spec, other)


def test_a_file_of_stacked_experts_is_told_without_its_base_model(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen3_moe")
    folder = write_adapter(tmp_path / "a", stacked_down(), **STACKED)
    told = survey_adapter(lambda headers: spec_alone(headers, spec), "a", folder)
    assert told.refusals == () and told.file is not None
    known = check_adapter_file(spec, "a", folder)
    assert [m.name for m in told.file.modules] == [
        f"layers.0.mlp.experts.{e}.down_proj" for e in range(6)
    ]
    assert [m.b for m in told.file.modules] == [m.b for m in known.modules]


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (
            stacked_down,
            {"target_parameters": None},
            "target_parameters in .* does not say of which",
        ),
        (stacked_down, {"target_parameters": ["experts.gate_up_proj"]}, "gate_up_proj lora_A is"),
        (stacked_down, {"r": 3}, r"F32 \[12, 40\], wanted \[18, 40\].*\(6 experts of rank 3\)"),
        (lambda: stacked_down(5), {"r": 5}, "rank 5, wanted at most 4: raise --max-lora-rank"),
        (
            stacked_down,
            {"target_parameters": ["mlp.experts.down_proj", "shared_expert.up"]},
            "target_parameters in .* names shared_expert.up, of which the file holds no tensor",
        ),
        (
            lambda: renamed(stacked_down(), "experts.", "experts.base_layer."),
            {},
            "base_layer.* does not say of which parameter",
        ),
        (
            lambda: stacked_down() | {f"{DOWN}.lora_B.bias": torch.ones(64)},
            {"lora_bias": True},
            "only lora_A and lora_B can be served",
        ),
        (
            lambda: {k: t for k, t in stacked_down().items() if "lora_A" in k},
            {},
            r"lora_A\.weight has no counterpart: .*experts\.lora_B\.weight is missing",
        ),
        (lambda: stacked_down() | each_down(), {}, "both name one module"),
        (
            lambda: renamed(each_down(), "experts.3", "experts.6"),
            {"target_parameters": None},
            r"experts\.6, but the base model has 6 experts \(0 to 5\)",
        ),
        (
            lambda: renamed(each_down(), "down_proj", "w2"),
            {"target_parameters": None},
            "adapts w2 of a layer, which is none of",
        ),
    ],
)
def test_what_does_not_fit_the_experts_is_refused_by_key(
    tmp_path: Path, tensors: Callable[[], Tensors], settings: dict[str, Any], message: str
) -> None:
    spec = spec_of(tmp_path, "qwen3_moe")
    folder = write_adapter(tmp_path / "a", tensors(), **{**STACKED, **settings})
    with pytest.raises(AdapterError, match=message):
        check_adapter_file(spec, "a", folder)


def test_parameters_of_a_model_without_experts_are_refused_by_name(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "llama")
    folder = write_adapter(tmp_path / "a", stacked_down(), **STACKED)
    with pytest.raises(AdapterError, match=r"target_parameters .*mlp\.experts\.down_proj"):
        check_adapter_file(spec, "a", folder)


def test_a_linears_weight_may_be_named_as_a_parameter(tmp_path: Path) -> None:
    """PEFT then takes rank and alpha by the parameter's name."""
    spec = spec_of(tmp_path, "llama")
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {
        f"{stem}.lora_A.weight": torch.ones(3, 64),
        f"{stem}.lora_B.weight": torch.ones(64, 3),
    }
    settings = {"target_parameters": ["q_proj.weight"], "rank_pattern": {"q_proj.weight": 3}}
    folder = write_adapter(tmp_path / "a", tensors, target_modules=[], **settings)
    (module,) = check_adapter_file(spec, "a", folder).modules
    assert (module.lora_rank, module.scaling) == (3, 4 / 3)


def test_layers_without_experts_among_layers_with_them_are_targets_of_their_own(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path, "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2)
    routed = [target for target in spec.targets if target.routed]
    assert [target.stack for target in routed] == [
        f"model.layers.{layer}.mlp.experts" for layer in (1, 1, 3, 3)
    ]
    assert {target.num_layers for target in routed} == {6}
    names = [target.name for target in spec.targets]
    assert "model.layers.0.mlp.gate_up_proj" in names and "model.layers.1.mlp.gate" in names
    # One rank of two has half of each expert's inner features, in gate and up and in down.
    (gate_up, down) = (slot_shapes(spec, target, 0, 2) for target in routed[:2])
    assert gate_up == ((6, 2 * 4, 64), (6, 40, 4)) and down == ((6, 4, 20), (6, 64, 4))


def test_some_experts_of_a_layer_cannot_be_left_out(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral")
    config = load_model_config(tmp_path)
    place = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("meta"))
    model = MODELS[config.architecture](config, place, 8)
    how: dict[str, Any] = {"slots": 1, "max_rank": 1, "cpu_capacity": 1, "dtype": "float32"}
    with pytest.raises(ConfigError, match="exclude all or none"):
        module_lora_spec(model, exclude=[r".*experts\.2\..*"], **how)
    spec = module_lora_spec(model, exclude=[r".*experts\..*"], **how)
    assert not any(target.routed for target in spec.targets)
    single = {key.replace(".mlp.", ".block_sparse_moe."): t for key, t in each_down().items()}
    one = write_adapter(tmp_path / "one", renamed(single, "down_proj", "w2"))
    with pytest.raises(AdapterError, match=r"experts\.0\.w2, which no adapter may change"):
        check_adapter_file(spec, "a", one)
    stacked = write_adapter(tmp_path / "stacked", stacked_down(), **STACKED)
    with pytest.raises(AdapterError, match=r"target_parameters .*mlp\.experts\.down_proj"):
        check_adapter_file(spec, "a", stacked)
