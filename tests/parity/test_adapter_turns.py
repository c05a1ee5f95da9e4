"""Adapters that take turns in few slots, and rows of many in any order, give the logits of merged
weights each time; nothing of an adapter stays in a slot that another takes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.lockstep_ranks import LockstepRanks
from support.peft_kit import logits_of

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.lora_files import STANDARD, write_adapter
from mstar_tp.testing.tiny_models import make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

VOCAB = 32
PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=1 << 20)
PROMPT = [1, 5, 9, 2]
SIZES = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}  # fmt: skip
"""[out, in] of every linear of a layer."""
ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all of rank 4": (4, tuple(SIZES)),
    "q of rank 2": (2, ("self_attn.q_proj",)),
    "two of rank 1": (1, ("mlp.up_proj", "self_attn.o_proj")),
    "all of rank 3": (3, tuple(SIZES)),
}
"""Rank and modules, in both layers."""


def write(folder: Path, name: str, model: Any, b_size: float = 0.3) -> Path:
    """A random adapter of scaling 2, in a folder and in the weights of ``model``."""
    rank, modules = ADAPTERS[name]
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in (0, 1):
        for module in modules:
            size_out, size_in = SIZES[module]
            a = 0.3 * torch.randn(rank, size_in, generator=generator)
            b = b_size * torch.randn(size_out, rank, generator=generator)
            stem = STANDARD.format(layer=layer, module=module)
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            model.get_submodule(f"model.layers.{layer}.{module}").weight.data += 2 * b @ a
    return write_adapter(folder, tensors, r=rank, lora_alpha=2 * rank)


class Bench:
    """The base model, adapters' folders and what transformers answers on merged weights."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.path = make_tiny_model(
            folder / "base",
            "llama",
            seed=0,
            hidden_size=8,
            intermediate_size=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            vocab_size=VOCAB,
        )
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.models: dict[str | None, Any] = {None: load(self.path, dtype=torch.float32).eval()}
        self.folders: dict[str, Path] = {}
        for name in ADAPTERS:
            model = self.models[name] = copy.deepcopy(self.models[None])
            self.folders[name] = write(folder / name, name, model)
        without = copy.deepcopy(self.models[None])
        self.folders["without effect"] = write(folder / "zero", "all of rank 3", without, 0.0)

    def wanted(self, name: str | None, prompt: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.models[name](torch.tensor([list(prompt)])).logits[0, -1]
        assert isinstance(logits, torch.Tensor)
        return logits

    def serve(self, tp: int, slots: int, held: int) -> LockstepRanks:
        folders = {name: str(folder) for name, folder in self.folders.items()}
        lora = LoraConfig(adapters=folders, max_loras=slots, max_cpu_loras=held, max_lora_rank=4)
        return LockstepRanks(
            EngineConfig(
                model=str(self.path),
                tensor_parallel_size=tp,
                dtype="float32",
                threads=1,
                max_model_len=32,
                block_size=4,
                lora=lora,
            )
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("turns"))


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    worst = float((got - wanted).abs().max() / wanted.abs().max())
    assert worst < 1e-5, f"{what}: off by {worst:.1e}"


def answer(ranks: LockstepRanks, name: str | None) -> torch.Tensor:
    """The prompt's logits, alone."""
    rid = ranks.open(PROMPT, PARAMS, None if name is None else AdapterKey(name, FIRST_GENERATION))
    if name is not None:
        assert ranks.wait_copies(rid) is None
    result = ranks.step([(rid, len(PROMPT))])[0]
    ranks.remove(rid)
    return logits_of(result.sampled[rid])


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_slot_held_before_changes_nothing(bench: Bench, tp: int) -> None:
    """One slot, CPU copies of two: every turn installs, every third reads again."""
    ranks = bench.serve(tp, slots=1, held=2)
    first: dict[str | None, torch.Tensor] = {}
    try:
        for _ in range(3):
            for name in (*ADAPTERS, None, *reversed(ADAPTERS), "without effect", None):
                got = answer(ranks, name)
                if name != "without effect":
                    assert_same(got, bench.wanted(name, PROMPT), f"{name}, tp {tp}")
                assert torch.equal(got, first.setdefault(name, got)), f"{name} has changed"
        # Factors of zero are the base model, bit for bit.
        assert torch.equal(first["without effect"], first[None])
    finally:
        ranks.close()


def test_rows_of_any_adapters_in_any_order_are_what_they_are_alone(bench: Bench) -> None:
    """Prompts and single tokens of four ranks and the base in one step, in 200 orders."""
    names = ["two of rank 1", "two of rank 1", "all of rank 3", None,
             "two of rank 1", "all of rank 4", "all of rank 4", "all of rank 3"]  # fmt: skip
    rows = [(name, [(3 * n + k) % VOCAB for k in range(n + 1)]) for n, name in enumerate(names)]
    wanted = [bench.wanted(name, prompt) for name, prompt in rows]
    ranks = bench.serve(1, slots=3, held=5)
    source = random.Random(0)
    try:
        for _ in range(200):
            order = source.sample(range(len(rows)), len(rows))
            rids = {}
            for at in order:
                name, prompt = rows[at]
                key = None if name is None else AdapterKey(name, FIRST_GENERATION)
                rids[at] = ranks.open(prompt, PARAMS, key)
                assert key is None or ranks.wait_copies(rids[at]) is None
            early = [at for at in order[::2] if len(rows[at][1]) > 1]
            ranks.step([(rids[at], len(rows[at][1]) - 1) for at in early])
            left = [(rids[at], 1 if at in early else len(rows[at][1])) for at in order]
            result = ranks.step(left)[0]
            for at, rid in rids.items():
                assert_same(logits_of(result.sampled[rid]), wanted[at], f"row {at} in {order}")
                ranks.remove(rid)
    finally:
        ranks.close()
