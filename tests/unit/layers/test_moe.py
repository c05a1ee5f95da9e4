"""Promise: experts are loaded exactly from either layout, each dealt to the ranks, and a token's
result depends neither on how many others go to its experts nor on where they go.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.paged_runner import PagedRunner
from support.thread_group import ThreadGroup, ThreadGroups

from mstar_tp.common.errors import CheckpointError, ConfigError
from mstar_tp.distributed.comm import CommGroup, SingleGroup
from mstar_tp.layers.activation import silu_and_mul
from mstar_tp.layers.moe import ExpertNames, RoutedExperts, Routing, route
from mstar_tp.layers.weights import MatrixPart, Placement
from mstar_tp.models import blocks_moe
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import load_model
from mstar_tp.testing.tiny_models import MOE_FAMILIES, Family, make_tiny_model

torch.set_num_threads(1)
EXPERTS, HIDDEN, INNER = 5, 24, 12
NAMES = ExpertNames(gate="w1", up="w3", down="w2")
TOKENS = [5, 17, 99, 3, 42]


class Stacked:
    """A checkpoint of one layer's stacked experts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
        self.tensors = {
            "mlp.experts.gate_up_proj": (gate_up / HIDDEN**0.5).to(dtype),
            "mlp.experts.down_proj": (down / INNER**0.5).to(dtype),
        }

    def has(self, key: str) -> bool:
        return key in self.tensors

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        raise AssertionError(key)

    read_columns: Any = read_rows

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        assert self.tensors[key].shape == shape
        rows, columns = (slice(r.start, r.stop) for r in part)
        out.copy_(self.tensors[key][index, rows, columns])

    def apply(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The layer's answer in float64, pair by pair."""
        gate_up, down = (tensor.double() for tensor in self.tensors.values())
        out = torch.zeros(x_TD.shape, dtype=torch.float64)
        for token, (experts, weights) in enumerate(zip(*routing, strict=True)):
            for expert, weight in zip(experts.tolist(), weights.double(), strict=True):
                gate, up = (gate_up[expert] @ x_TD[token].double()).split(INNER)
                inner = torch.nn.functional.silu(gate) * up
                out[token] += weight * (down[expert] @ inner)
        return out


def built(group: CommGroup, dtype: torch.dtype = torch.float32) -> RoutedExperts:
    place = Placement(group=group, dtype=dtype, device=torch.device("cpu"))
    experts = RoutedExperts(HIDDEN, INNER, EXPERTS, NAMES, silu_and_mul, place)
    experts.load(Stacked(dtype), "mlp")
    return experts


def routed(num_tokens: int, seed: int, *, only: int = EXPERTS) -> Routing:
    """Two of the first ``only`` experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    return route(torch.randn(num_tokens, only, generator=generator), 2, True)


def some(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 7, 100])
def test_every_token_gets_its_experts_weighted_sum(world_size: int, num_tokens: int) -> None:
    """Also when all go to two experts, so that most have no token."""
    x, checkpoint = some(num_tokens), Stacked()

    def rank_main(group: ThreadGroup) -> None:
        experts = built(group)
        for routing in (routed(num_tokens, 1), routed(num_tokens, 2, only=2)):
            got = experts(x, routing)
            wanted = checkpoint.apply(x, routing)
            assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()

    ThreadGroups(world_size).run(rank_main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [6, 150])
def test_a_token_is_the_same_wherever_its_neighbours_go(
    num_tokens: int, dtype: torch.dtype
) -> None:
    experts, x = built(SingleGroup(), dtype), some(num_tokens, dtype)
    routing = routed(num_tokens, 3)
    wanted = experts(x, routing)
    other = routed(num_tokens, 4, only=2)
    mixed = [torch.cat([a[::2], b[1::2]]) for a, b in zip(routing, other, strict=True)]
    shuffled = torch.cat([x[::2], x[1::2]])
    got = experts(shuffled, Routing(*mixed))
    assert torch.equal(got[: len(x[::2])], wanted[::2])
    assert not torch.equal(got[len(x[::2]) :], wanted[1::2])


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_rank_sends_tokens_to_the_same_experts_by_the_same_weights(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: else ranks would sum parts of different experts."""
    make_tiny_model(tmp_path, family, 2)
    config = load_model_config(tmp_path)
    seen: dict[int, list[Routing]] = {}

    def watched(*arguments: Any) -> Routing:
        routing = route(*arguments)
        seen.setdefault(threading.get_ident(), []).append(routing)
        return routing

    monkeypatch.setattr(blocks_moe, "route", watched)

    def rank_main(group: ThreadGroup) -> list[Routing]:
        model = load_model(tmp_path, config, group, torch.bfloat16, torch.device("cpu"))
        PagedRunner(model).prefill("a", [*TOKENS, *range(40)], 20)
        return seen[threading.get_ident()]

    first, *others = ThreadGroups(4).run(rank_main)
    assert len(first) == 3 * config.num_layers
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine.experts, theirs.experts)
            assert torch.equal(mine.weights, theirs.weights)


def test_too_few_inner_features_for_the_ranks_are_refused() -> None:
    place = Placement(group=ThreadGroups(8)[0], dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"experts.*12 blocks do not divide over 8 ranks"):
        RoutedExperts(HIDDEN, INNER, EXPERTS, NAMES, silu_and_mul, place)


def load(folder: Path) -> CausalLM:
    config = load_model_config(folder)
    return load_model(folder, config, SingleGroup(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_stacked_and_published_checkpoints_are_one_model(tmp_path: Path, family: Family) -> None:
    """transformers reads both, and writes the published one."""
    folder = make_tiny_model(tmp_path, family, 1)
    wanted = PagedRunner(load(folder)).prefill("a", TOKENS)
    path = folder / "model.safetensors"
    published = load_file(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stacked = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in set(stacked) - set(published)
    save_file(stacked, path)
    got = PagedRunner(load(folder)).prefill("a", TOKENS)
    assert wanted is not None and got is not None and torch.equal(got, wanted)
    del stacked["model.layers.1.mlp.experts.down_proj"]
    save_file(stacked, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.\w+\.experts\.down_proj"):
        load(folder)
    stray = next(key for key in published if "layers.1" in key and "experts.4" in key)
    published[stray.replace("experts.4", "experts.7")] = published[stray]
    save_file({key: tensor.clone() for key, tensor in published.items()}, path)
    with pytest.raises(CheckpointError, match=r"experts\.7"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, wanted at most the 6 experts"),
        ({"num_experts": 4}, "num_local_experts is 6, wanted num_experts = 4"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers is .*, wanted a list of layer numbers"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM.*, wanted one of"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_tiny_model(tmp_path, "qwen3_moe", 1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_which_layers_have_experts_is_as_transformers_builds_them(tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}
    make_tiny_model(tmp_path, "qwen3_moe", 1, **settings)
    config = load_model_config(tmp_path)
    experts = config.experts
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = model.model.layers
    assert experts is not None
    assert experts.layers == {i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
    weights = sum(
        p.numel() for n, p in model.named_parameters() if ".mlp." in n and "gate.w" not in n
    )
    assert weights == 3 * config.inner_sizes * config.hidden_size


def test_what_config_json_leaves_out_is_the_familys_own(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral", 1)
    path = tmp_path / "config.json"
    tree = json.loads(path.read_text())
    for key in ("rope_parameters", "rms_norm_eps", "sliding_window"):
        del tree[key]
    path.write_text(json.dumps(tree))
    config = load_model_config(tmp_path)
    assert config.ropes[0].theta == 1_000_000.0
    assert config.rms_norm_eps == 1e-5
    assert config.windows == (None, None)
