"""Promise: a stage's spec follows from its own modules: what they are, how alike a list's entries
are, what the checkpoint calls them; and what the model says about them must fit them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from mstar_tp.common.errors import AdapterError, ConfigError
from mstar_tp.common.module_names import CheckpointRules
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.lora.binding import (
    bind,
    check_bound,
    module_lora_spec,
)
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.layers.linear import RowParallelLinear
from mstar_tp.layers.lora.embedding import VocabParallelEmbeddingWithLora
from mstar_tp.layers.lora.linear import WithLoraDelta, is_bound
from mstar_tp.layers.lora.norm import RMSNormWithLora
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.format.keys import parse_key
from mstar_tp.lora.format.placing import ModelIndex
from mstar_tp.lora.spec import LoraParallel, LoraSpec
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.lora.stage_specs import ModelLoraSpecs
from mstar_tp.models.blocks import CausalLM, PreNormDecoder
from mstar_tp.models.config.families import load_model_config
from mstar_tp.testing.lora_files import pair, tiny_spec, with_vocab, write_adapter

LIMITS: dict[str, Any] = {"slots": 2, "max_rank": 4, "cpu_capacity": 4, "dtype": "float32"}
PLACE = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def llama(tmp_path: Path) -> nn.Module:
    """A decoder of two layers, built as models build it, without weights."""
    tree = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = load_model_config(tmp_path)
    return CausalLM(config, PLACE, PreNormDecoder(config, PLACE, 64))


def _pool(spec: LoraSpec) -> LoraAdapterPool:
    return LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=lambda landed: None,
    )


class Block(nn.Module):
    """A tower's layer: plain linears, as no rank splits it."""

    def __init__(self, hidden: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner)
        self.fc2 = nn.Linear(inner, hidden)


class Tower(nn.Module):
    """Patches, blocks, then a projector of two linears around an activation."""

    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, kernel_size=2, stride=2)
        self.blocks = nn.ModuleList(Block(inner=size) for size in inner)
        self.proj = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def tower(*inner: int) -> Tower:
    with torch.device("meta"):
        return Tower(*inner)


def modules(spec: LoraSpec) -> list[str]:
    """Every name of the checkpoint that factors may have."""
    return [
        target.module(layer, i)
        for target in spec.targets
        for layer in range(target.num_layers)
        for i in range(len(target.out_slices))
    ]


# ------------------------------------------------------------------ what the walk finds


def test_the_walk_finds_every_module_as_the_checkpoint_names_it(llama: nn.Module) -> None:
    targets = module_lora_spec(llama, **LIMITS).targets
    names = [t.module(1, i) for t in targets for i in range(len(t.out_slices))]
    layer = "model.layers.1"
    assert names == [
        *(f"{layer}.self_attn.{n}_proj" for n in "qkvo"),
        *(f"{layer}.mlp.{n}_proj" for n in ("gate", "up", "down")),
        f"{layer}.input_layernorm",
        f"{layer}.post_attention_layernorm",
        "model.norm",
        "model.embed_tokens",
        "lm_head",
    ]
    wanted = with_vocab(tiny_spec(), 32).targets
    others = [target for target in targets if target.parallel is not LoraParallel.NORM]
    for found, target in zip(others, wanted, strict=True):
        # Row-parallel inputs are dealt by single features here, by heads in the model.
        assert replace(found, out_slices=target.out_slices, in_units=target.in_units) == target
        assert [part.name for part in found.out_slices] == [p.name for p in target.out_slices]


def test_files_spell_modules_by_the_rules_that_the_loader_goes_by(
    llama: nn.Module, tmp_path: Path
) -> None:
    rules = CheckpointRules(
        (("old.decoder", "model"), ("old.decoder.final", "model.norm"), ("top", "lm_head"))
    )
    assert (
        rules.own("old.decoder.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    )
    assert rules.own("old.decoder.final.weight") == "model.norm.weight"
    assert rules.own("old.decoders.final") == "old.decoders.final"
    spec = module_lora_spec(llama, rules, **LIMITS)
    tensors = pair("base_model.model.old.decoder.layers.1.mlp.up_proj", 8, 16)
    tensors |= pair("base_model.model.top", 8, 32)
    file = check_adapter_file(spec, "x", write_adapter(tmp_path / "x", tensors))
    assert [m.name for m in file.modules] == ["model.layers.1.mlp.up_proj", "lm_head"]
    kohya = {
        f"lora_te_old_decoder_layers_1_mlp_up_proj.lora_{way}.weight": torch.ones(shape)
        for way, shape in (("down", (2, 8)), ("up", (16, 2)))
    }
    save_file(kohya, tmp_path / "y.safetensors")
    (found,) = check_adapter_file(spec, "y", tmp_path / "y.safetensors").modules
    assert found.name == "model.layers.1.mlp.up_proj"


def test_a_node_is_the_modules_under_its_parts(llama: nn.Module) -> None:
    root = nn.ModuleDict({"tower": tower(16), "proj": nn.Linear(8, 8), "llm": llama})
    spec = module_lora_spec(root, **LIMITS, parts=["tower.blocks", "proj"])
    names = ["tower.blocks.0.fc1", "tower.blocks.0.fc2", "proj"]
    assert modules(spec) == names
    assert [site.path for site in spec.sites] == names
    with pytest.raises(AttributeError):
        module_lora_spec(root, **LIMITS, parts=["tower.layers"])


def test_entries_alike_are_one_stack_and_others_one_target_each() -> None:
    spec = module_lora_spec(tower(16, 16), **LIMITS)
    found = {target.name: (target.stack, target.num_layers) for target in spec.targets}
    assert found == {
        "patch": ("", 1),
        "fc1": ("blocks", 2),
        "fc2": ("blocks", 2),
        "proj.0": ("", 1),
        "proj.2": ("", 1),
    }
    # Of another size in the middle: both linears of it differ.
    grouping = RowGrouping(per=4)
    uneven = module_lora_spec(tower(16, 20, 16), **LIMITS, rows={"fc1": grouping})
    assert [target.name for target in uneven.targets][1:7] == [
        f"blocks.{i}.{name}" for i in range(3) for name in ("fc1", "fc2")
    ]
    assert all(target.num_layers == 1 and not target.stack for target in uneven.targets)
    seen = {target.name: target.row_grouping for target in uneven.targets}
    assert [name for name, rows in seen.items() if rows == grouping] == [
        f"blocks.{i}.fc1" for i in range(3)
    ]
    assert modules(uneven)[1] == "blocks.0.fc1"


def test_a_sequential_is_a_stack_by_its_type_and_its_entries_may_be_the_linears() -> None:
    class Node(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anything = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            self.nested = nn.Sequential(nn.Linear(8, 4), nn.ModuleList([Block(), Block()]))

    with torch.device("meta"):
        spec = module_lora_spec(nn.ModuleDict({"tower": Node()}), **LIMITS)
    found = {target.name: (target.stack, target.num_layers) for target in spec.targets}
    assert found == {
        "anything": ("tower.anything", 3),
        "nested": ("", 1),
        "fc1": ("tower.nested.1", 2),
        "fc2": ("tower.nested.1", 2),
    }
    assert modules(spec)[2:4] == ["tower.anything.2", "tower.nested.0"]


def test_clashing_names_are_widened_by_their_stacks_and_an_error_outside() -> None:
    class Node(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.ModuleList(Block() for _ in range(2))
            self.late = nn.ModuleList(Block() for _ in range(2))
            self.one = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

    stage = Node()
    spec = module_lora_spec(stage, **LIMITS, names={"fc1": "up"})
    names = ["early.up", "early.fc2", "late.up", "late.fc2", "one", "other"]
    assert [target.name for target in spec.targets] == names
    assert modules(spec)[0] == "early.0.fc1"
    with pytest.raises(ConfigError, match="one and other are both called 'x'"):
        module_lora_spec(stage, **LIMITS, names={"one": "x", "other": "x"})
    with pytest.raises(ConfigError, match="names has 'fc3'"):
        module_lora_spec(stage, **LIMITS, names={"fc3": "x"})


TREES = st.recursive(
    st.sampled_from([2, 3]),  # an output size
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "0"]), inner, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


def _tree(shape: Any) -> nn.Module:
    if isinstance(shape, int):
        return nn.Linear(2, shape)
    if isinstance(shape, list):
        kind = nn.Sequential if len(shape) % 2 else nn.ModuleList
        inner = [_tree(part) for part in shape]
        return nn.Sequential(*inner) if kind is nn.Sequential else nn.ModuleList(inner)
    return nn.ModuleDict({name: _tree(part) for name, part in shape.items()})


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), TREES, min_size=1))
def test_whatever_the_tree_every_linear_is_one_place_under_its_own_name(shape: Any) -> None:
    with torch.device("meta"):
        root = _tree(shape)
    spec = module_lora_spec(root, **LIMITS)
    linears = {n: m for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    targets = {target.name: target for target in spec.targets}
    assert len(targets) == len(spec.targets)
    assert sorted(modules(spec)) == sorted(linears)
    assert sorted(site.path for site in spec.sites) == sorted(linears)
    for path, name, layer in spec.sites:
        assert targets[name].module(layer, 0) == path
        assert targets[name].out_features == linears[path].out_features
        # And what an adapter's file says of it leads there.
        for key in (f"base_model.model.{path}.lora_A.weight", f"lora_te_{_flat(path)}.alpha"):
            parsed = parse_key(key)
            assert parsed is not None
            place = ModelIndex((spec,)).find(parsed).place
            assert (place.target.name, place.layer, place.name) == (name, layer, path)
    ModelLoraSpecs({"node": spec})


def _flat(path: str) -> str:
    return path.replace(".", "_")


@pytest.mark.parametrize("setting", ["exclude", "rows"])
def test_a_pattern_that_matches_nothing_is_refused(setting: str) -> None:
    patterns: Any = {"fc3": RowGrouping.SEGMENTS} if setting == "rows" else ["fc1", "fc3"]
    with pytest.raises(ConfigError, match=f"{setting} pattern 'fc3' matches no module"):
        module_lora_spec(tower(16), **LIMITS, **{setting: patterns})


# ------------------------------------------------------------------ what nobody may change


class CrossAttention(nn.Module):
    lora_unservable: ClassVar[Mapping[str, str]] = {
        "k": "it runs over an encoder's rows",
        "v": "it runs over an encoder's rows",
    }

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))


class Encoder(nn.Module):
    lora_unservable: ClassVar[Mapping[str, str]] = {
        "positions": "it encodes positions, not the step's rows",
        "gate.fold": "it is folded into the norm before it at load",
    }

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(CrossAttention() for _ in range(2))
        self.positions = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8))
        self.gate = nn.ModuleDict({"fold": nn.Linear(8, 8), "up": nn.Linear(8, 8)})
        self.conv = nn.Conv2d(3, 8, kernel_size=3, stride=2)
        self.other = nn.Linear(8, 8)
        self.odd = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)


@pytest.fixture
def encoder_spec() -> LoraSpec:
    with torch.device("meta"):
        root = nn.ModuleDict({"encoder": Encoder()})
    # Declared and excluded: the declared reason is the one that is told.
    return module_lora_spec(root, **LIMITS, exclude=[r"encoder\.gate\..*", r".*\.other"])


def test_what_is_declared_unservable_is_no_target(encoder_spec: LoraSpec) -> None:
    assert modules(encoder_spec) == ["encoder.cross.0.q", "encoder.cross.1.q"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("encoder.cross.1.k", "it runs over an encoder's rows"),
        ("encoder.positions.0", "it encodes positions, not the step's rows"),
        ("encoder.gate.fold", "it is folded into the norm before it at load"),
        ("encoder.gate.up", "it is excluded from adapters here"),
        ("encoder.conv", "stride (2, 2) and kernel (3, 3)"),
        ("encoder.odd", "is a NonDynamicallyQuantizableLinear"),
    ],
)
def test_an_adapter_on_what_is_unservable_is_refused_with_the_reason(
    encoder_spec: LoraSpec, module: str, reason: str, tmp_path: Path
) -> None:
    tensors = pair("base_model.model.encoder.cross.0.q", 8, 8)
    tensors |= pair(f"base_model.model.{module}", 8, 8)
    with pytest.raises(AdapterError) as caught:
        check_adapter_file(encoder_spec, "x", write_adapter(tmp_path, tensors))
    assert f"adapts {module}, which no adapter may change" in str(caught.value)
    assert reason in str(caught.value)


def test_a_declared_child_that_does_not_exist_is_an_error() -> None:
    block = Block()
    block.lora_unservable = {"fc3": "it is folded"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="lora_unservable names fc3, but Block has no such child"):
        module_lora_spec(nn.ModuleDict({"block": block}), **LIMITS)


def test_a_helper_that_reads_a_weight_calls_a_bound_module_instead() -> None:
    """As fused helpers must: a module that is not bound keeps its fast way."""

    def fused(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if is_bound(linear):
            called: torch.Tensor = linear(x)
            return called
        return x @ linear.weight.t() + linear.bias

    block, x = Block(), torch.ones(3, 8)
    pool = _pool(module_lora_spec(block, **LIMITS, exclude=["fc2"]))
    free = fused(block.fc1, x)
    assert bind(block, pool) == 1
    assert is_bound(block.fc1) and not is_bound(block.fc2)
    with pool.deltas.base_only():
        torch.testing.assert_close(fused(block.fc1, x), free)
    pool.close()


# ------------------------------------------------------------------ binding


def test_binding_swaps_every_target_and_no_other_module(llama: nn.Module) -> None:
    before = {name: type(module) for name, module in llama.named_modules()}
    pool = _pool(module_lora_spec(llama, **LIMITS, exclude=[r".*\.down_proj", "lm_head"]))
    assert bind(llama, pool) == 7 + 5
    check_bound(llama, pool)
    for name, module in llama.named_modules():
        bound = name.endswith(("qkv_proj", "o_proj", "gate_up_proj", "embed_tokens"))
        bound = bound or name.endswith("norm")
        twins = (WithLoraDelta, VocabParallelEmbeddingWithLora, RMSNormWithLora)
        assert isinstance(module, twins) == bound
        assert bound or type(module) is before[name]
    pool.close()


def test_a_module_that_was_not_bound_is_named_before_anything_is_served() -> None:
    block = Block()
    pool = _pool(module_lora_spec(block, **LIMITS))
    with pytest.raises(ConfigError, match="fc1 is not bound: no delta would be added to it"):
        check_bound(block, pool)
    assert bind(block, pool) == 2
    check_bound(block, pool)
    pool.close()


# ------------------------------------------------------------------ several nodes


def test_a_spec_that_no_walk_made_is_refused_where_specs_are_declared(llama: nn.Module) -> None:
    walked = module_lora_spec(llama, **LIMITS)
    ModelLoraSpecs({"llm": walked.apply_yaml_overrides({"slots": 1})})
    with pytest.raises(ConfigError, match="of tower was not made by module_lora_spec"):
        ModelLoraSpecs({"llm": walked, "tower": tiny_spec()})
    with pytest.raises(ConfigError, match=r"llm and again both have model\.layers\.0"):
        ModelLoraSpecs({"llm": walked, "again": walked})
    with pytest.raises(ConfigError, match=r"lora\.sites is no option: there are slots"):
        walked.apply_yaml_overrides({"sites": ()})


def test_a_row_parallel_linear_outside_every_list_is_a_target() -> None:
    stage = nn.ModuleDict({"out": RowParallelLinear(8, "out", 6, PLACE)})
    (target,) = module_lora_spec(stage, **LIMITS).targets
    assert (target.name, target.parallel, target.module(0, 0)) == ("out", LoraParallel.ROW, "out")
