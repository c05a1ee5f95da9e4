"""Promise: adapters on plain linears and patch convolutions give what PEFT gives, on whatever rows
of the step those see; and several nodes of one model each take their own part of one file.

A made-up tower: patches, a class token before them, three blocks of which one is narrower, a merger
of three patches, a pooled head. Four images in one step, on three adapters and on none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mstar_tp.common.errors import AdapterError, ConfigError, LockstepError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.lora.binding import bind, check_bound, module_lora_spec
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.layers.lora.plain import patches_of
from mstar_tp.layers.patches import PatchConv
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.testing.lora_files import pair, random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

LIMITS: dict[str, Any] = {"slots": 3, "max_rank": 4, "cpu_capacity": 4, "dtype": "float32"}
ROWS = {
    r".*\.patch": RowGrouping(skip=1),
    r".*\.merger": RowGrouping(per=3, skip=1),
    r".*\.pooled": RowGrouping.SEGMENTS,
}
TOKENS = 7
"""Of an image of 5 x 7: 2 x 3 patches, a remainder on both sides, and the class token."""
P, Q, R = (AdapterKey(name, 0) for name in "pqr")
KEYS = (P, None, Q, R)
"""Of the images, in order."""


class Block(nn.Module):
    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, inner)
        self.fc2 = nn.Linear(inner, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.fc2(torch.tanh(self.fc1(x))) * self.gate(x).sigmoid()
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, kernel_size=2, stride=2)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList(Block(inner) for inner in (12, 10, 12))
        self.merger = nn.Linear(24, 6)
        self.pooled = nn.Linear(8, 6, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, 5, 7] -> the merged rows and the pooled one of each, [N, 3, 6]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(images), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        merged = self.merger(x[:, 1:].reshape(len(images), 2, 24))
        return torch.cat([merged, self.pooled(x[:, 0]).unsqueeze(1)], dim=1)


class Whole(nn.Module):
    """As transformers would hold it: the tower in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.vision_tower(images)
        return out


class Tuned(NamedTuple):
    model: Whole
    folders: dict[AdapterKey, Path]
    images: torch.Tensor
    wanted: dict[AdapterKey | None, torch.Tensor]
    """Of every image under each adapter, by PEFT from the file."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    import peft

    torch.manual_seed(7)
    torch.set_num_threads(1)
    model, images = Whole().eval(), torch.randn(4, 3, 5, 7)
    # A linear without a bias has none inside LoRA either.
    biased = ["patch", "fc1", "fc2", "gate", "merger"]
    settings: dict[AdapterKey, dict[str, Any]] = {
        P: {"r": 3, "lora_alpha": 5, "target_modules": biased, "lora_bias": True},
        Q: {
            "r": 2,
            "target_modules": ["patch", "fc2", "merger", "pooled"],
            "rank_pattern": {"patch": 4},
            "use_rslora": True,
        },
        R: {"r": 2, "target_modules": ["fc2", "gate"], "layers_to_transform": [1]},
    }
    folders: dict[AdapterKey, Path] = {}
    wanted: dict[AdapterKey | None, torch.Tensor] = {}
    with torch.no_grad():
        wanted[None] = model(images)
        for key, how in settings.items():
            folders[key] = tmp_path_factory.mktemp(key.name)
            trained = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**how))
            for name, parameter in trained.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
            trained.save_pretrained(str(folders[key]))
            again = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folders[key]))
            wanted[key] = again.eval()(images)
    return Tuned(model, folders, images, wanted)


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(
            "mstar_tp.lora.device.slot_weights.cpu_kernels", lambda device, dtype: None
        )
    elif cpu_kernels(torch.device("cpu"), torch.float32) is None:
        pytest.skip("no C++ compiler")


class Served(NamedTuple):
    model: Whole
    pool: LoraAdapterPool

    def run(self, images: torch.Tensor, tokens: int = TOKENS) -> torch.Tensor:
        """One step: an image a request, of those that hold slots."""
        rows = [
            StepRow(rid=rid, start=0, num_tokens=tokens, samples=True) for rid in range(len(KEYS))
        ]
        step = StepBatch(tp_seq=1, rows=tuple(rows))
        self.pool.plan(step)
        with torch.inference_mode():
            out: torch.Tensor = self.model(images)
        self.pool.commit(step)
        return out


def _pool(spec: LoraSpec, landed: SimpleQueue[CopyIn], *others: LoraSpec) -> LoraAdapterPool:
    return LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=landed.put,
        context=PoolContext(others=others),
    )


@pytest.fixture
def served(tuned: Tuned, way: None) -> Iterator[Served]:
    model = copy.deepcopy(tuned.model)
    landed: SimpleQueue[CopyIn] = SimpleQueue()
    pool = _pool(module_lora_spec(model, **LIMITS, rows=ROWS), landed)
    assert bind(model, pool) == 3 + 3 * 3
    check_bound(model, pool)
    pool.loads.preload([(key, str(folder)) for key, folder in tuned.folders.items()])
    for _ in tuned.folders:
        assert pool.copy_in(landed.get(timeout=30))
    for rid, key in enumerate(KEYS):
        assert pool.ingest_request(rid, LoraReqConfig(key)) is None
    rows = tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in range(len(KEYS)))
    assert not pool.admit(StepBatch(tp_seq=0, rows=rows)).failed
    yield Served(model, pool)
    pool.close()


def test_every_row_of_a_tower_gives_what_peft_gives(served: Served, tuned: Tuned) -> None:
    got = served.run(tuned.images)
    for row, key in enumerate(KEYS):
        wanted = tuned.wanted[key][row]
        assert float((got[row] - wanted).abs().max() / wanted.abs().max()) < 1e-5, key
    # Each adapter matters at every place, or the comparison would prove nothing.
    for row in (0, 2, 3):
        assert bool(((got[row] - tuned.wanted[None][row]).abs() > 1e-3).any(dim=-1).all()), row


def test_rows_without_an_adapter_keep_every_bit(served: Served, tuned: Tuned) -> None:
    with torch.inference_mode():
        free = tuned.model(tuned.images)
    assert torch.equal(served.run(tuned.images)[1], free[1])


def test_rows_that_the_step_did_not_plan_are_refused(served: Served, tuned: Tuned) -> None:
    with pytest.raises(LockstepError, match="called with 24 rows, but the step plans 36"):
        served.run(tuned.images, tokens=10)
    with pytest.raises(ConfigError, match="a segment of 9 tokens does not come to rows of 3"):
        served.run(tuned.images, tokens=9)


def test_a_convolution_that_runs_as_a_gemm_takes_factors_too(way: None, tmp_path: Path) -> None:
    """The engine's own patch convolution: against the kernel with the adapter merged into it."""
    place = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("cpu"))
    conv = PatchConv(8, 2, place, name="patch")
    kernel, images = torch.randn(8, 3, 2, 2), torch.randn(2, 3, 5, 7)
    conv.weight = LinearWeight(kernel.flatten(1))
    a, b = torch.randn(2, 3, 2, 2), torch.randn(8, 2, 1, 1)
    tensors = {"patch.lora_A.weight": a, "patch.lora_B.weight": b}
    root = nn.ModuleDict({"patch": conv})
    landed: SimpleQueue[CopyIn] = SimpleQueue()
    pool = _pool(module_lora_spec(root, **LIMITS), landed)
    assert bind(root, pool) == 1
    pool.loads.preload([(P, str(write_adapter(tmp_path, tensors)))])
    assert pool.copy_in(landed.get(timeout=30))
    for rid, key in enumerate((P, None)):
        pool.ingest_request(rid, LoraReqConfig(key))
    rows = tuple(StepRow(rid=rid, start=0, num_tokens=6, samples=True) for rid in range(2))
    step = StepBatch(tp_seq=0, rows=rows)
    assert not pool.admit(step).failed
    pool.plan(step)
    got = conv(images)
    pool.close()
    merged = kernel + 2 * torch.einsum("orxy,rckl->ockl", b, a)  # alpha 4 over rank 2
    for row, weight in enumerate((merged, kernel)):
        wanted = nn.functional.conv2d(images[row], weight, stride=2).flatten(1).t()
        torch.testing.assert_close(got[row], wanted, rtol=1e-5, atol=1e-4)


def test_patches_are_a_convolutions_output_positions_in_time_too() -> None:
    clip = torch.randn(2, 3, 5, 4, 7)
    conv = nn.Conv3d(3, 4, kernel_size=(2, 2, 3), stride=(2, 2, 3), bias=False)
    rows = patches_of(clip, (2, 2, 3)) @ conv.weight.flatten(1).t()
    wanted = conv(clip).movedim(1, -1).reshape(-1, 4)
    torch.testing.assert_close(rows, wanted)
    torch.testing.assert_close(patches_of(clip[0], (2, 2, 3)), patches_of(clip[:1], (2, 2, 3)))


@pytest.mark.parametrize(
    ("half", "shape", "wanted"),
    [
        ("lora_A", (3, 12), r"lora_A is \[3, 12\], wanted \[3, 3, 2, 2\]"),
        ("lora_A", (3, 3, 4, 1), r"lora_A is \[3, 3, 4, 1\], wanted \[3, 3, 2, 2\]"),
        ("lora_B", (8, 3), r"lora_B is \[8, 3\], wanted \[8, 3, 1, 1\]"),
    ],
)
def test_factors_of_a_patch_convolution_have_its_kernel(
    tuned: Tuned, half: str, shape: tuple[int, ...], wanted: str, tmp_path: Path
) -> None:
    spec = module_lora_spec(tuned.model, **LIMITS)
    tensors = load_file(tuned.folders[P] / "adapter_model.safetensors")
    key = f"base_model.model.vision_tower.patch.{half}.weight"
    tensors[key] = tensors[key].reshape(shape)
    (tmp_path / "adapter_config.json").write_bytes(
        (tuned.folders[P] / "adapter_config.json").read_bytes()
    )
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=wanted):
        check_adapter_file(spec, "x", tmp_path)


# ------------------------------------------------------------------ several nodes


@pytest.fixture
def specs(tuned: Tuned) -> tuple[LoraSpec, LoraSpec]:
    """A decoder's, and the tower's: target names of the two may clash."""
    return tiny_spec(), module_lora_spec(
        tuned.model, **LIMITS, rows=ROWS, names={"fc1": "mlp.down_proj"}
    )


def _joint_file(folder: Path, tuned: Tuned, decoder: LoraSpec, *extra: str) -> Path:
    """An adapter that touches both nodes, named as transformers nests them."""
    tensors = load_file(tuned.folders[Q] / "adapter_model.safetensors")
    mine = random_pairs(decoder, rank=2, seed=1)
    for key, tensor in mine.items():
        tensors[key.replace("model.model.", "model.model.language_model.")] = tensor
    for module in extra:
        tensors |= pair(f"base_model.model.{module}", 8, 8)
    config = {"r": 2, "rank_pattern": {"patch": 4}, "target_modules": "all-linear"}
    return write_adapter(folder, tensors, **config)


def test_each_node_takes_its_own_part_of_one_file(
    specs: tuple[LoraSpec, LoraSpec], tuned: Tuned, tmp_path: Path
) -> None:
    decoder, tower = specs
    folder = _joint_file(tmp_path / "joint", tuned, decoder)
    mine = check_adapter_file(decoder, "x", folder, [tower])
    theirs = check_adapter_file(tower, "x", folder, [decoder])
    assert mine.notes == theirs.notes == ()
    assert {m.name.split(".")[0] for m in mine.modules} == {"model"}
    assert {m.name.split(".")[0] for m in theirs.modules} == {"vision_tower"}
    whole = len(load_file(folder / "adapter_model.safetensors"))
    assert 2 * (len(mine.modules) + len(theirs.modules)) == whole
    # One that changes the tower alone has nothing for the decoder, and is no error there.
    alone = check_adapter_file(decoder, "x", tuned.folders[Q], [tower])
    assert (alone.targets, alone.lora_rank) == ((), 0)
    with pytest.raises(AdapterError, match=r"vision_tower\.blocks\.0\.fc2, which is none of"):
        check_adapter_file(decoder, "x", tuned.folders[Q])


def test_a_tensor_that_no_node_places_refuses_the_file_in_every_node(
    specs: tuple[LoraSpec, LoraSpec], tuned: Tuned, tmp_path: Path
) -> None:
    decoder, tower = specs
    folder = _joint_file(tmp_path / "extra", tuned, decoder, "projector.linear")
    for spec, other in ((decoder, tower), (tower, decoder)):
        with pytest.raises(AdapterError, match=r"projector\.linear, which is none of"):
            check_adapter_file(spec, "x", folder, [other])


def test_a_fault_in_another_nodes_part_refuses_the_file(
    specs: tuple[LoraSpec, LoraSpec], tuned: Tuned, tmp_path: Path
) -> None:
    decoder, tower = specs
    folder = _joint_file(tmp_path / "deep", tuned, decoder, "vision_tower.blocks.3.gate")
    with pytest.raises(AdapterError, match=r"names vision_tower\.blocks\.3, but .* has 3 blocks"):
        check_adapter_file(decoder, "x", folder, [tower])


def test_the_longer_agreement_breaks_a_tie_and_no_more_is_guessed(tmp_path: Path) -> None:
    """Two decoders whose names differ in words that files may leave out."""

    def spec(first: str, second: str) -> LoraSpec:
        stage = nn.ModuleDict({"layers": nn.ModuleList([Block()])})
        inner = nn.ModuleDict({second: stage})
        return module_lora_spec(nn.ModuleDict({first: inner}), **LIMITS)

    stages = [spec("language_model", "model"), spec("text_encoder", "model"), spec("llm", "llm")]

    def modules(name: str) -> list[list[str]]:
        tensors = pair(f"base_model.model.{name}.layers.0.fc1", 8, 12)
        folder = write_adapter(tmp_path / name, tensors)
        found = []
        for i, stage in enumerate(stages):
            file = check_adapter_file(stage, "x", folder, [*stages[:i], *stages[i + 1 :]])
            found.append([module.name for module in file.modules])
        return found

    assert modules("text_encoder.model") == [[], ["text_encoder.model.layers.0.fc1"], []]
    assert modules("llm") == [[], [], ["llm.llm.layers.0.fc1"]]
    with pytest.raises(AdapterError, match="may mean a module of several parts of the model"):
        modules("model")
