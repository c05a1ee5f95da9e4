"""Adapter files that other servers got wrong, served with the right values.

Each case says by hand what the adapter must add to which weights; the oracle is transformers on the
base with those sums in its weights, so no parser is trusted with its own answer. Float32, prompt
[1, 5, 9, 2], 8 greedy tokens: the same tokens, and logits within 1e-5 of the largest.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.lora_files import STANDARD, pair, write_adapter
from mstar_tp.testing.tiny_models import make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

PROMPT = [1, 5, 9, 2]
NUM_TOKENS = 8
PARAMS = SamplingParams(max_tokens=NUM_TOKENS + 1, temperature=0, logprobs=1 << 20)
Tensors = dict[str, torch.Tensor]
Change = Callable[[Any], None]
"""Adds to a transformers model what an adapter must add."""


def q(layer: int) -> str:
    return STANDARD.format(layer=layer, module="self_attn.q_proj")


def q_pairs(**how: Any) -> Tensors:
    return pair(q(0), 8, 8, **how) | pair(q(1), 8, 8, **how)


def add(*entries: tuple[str, float | torch.Tensor]) -> Change:
    """Add a number or a matrix to the weight of each module."""

    def change(model: Any) -> None:
        for name, value in entries:
            model.get_submodule(name).weight.data += value

    return change


def q_add(first: float, second: float) -> Change:
    return add(*((f"model.layers.{n}.self_attn.q_proj", v) for n, v in enumerate((first, second))))


def ramp(rows: int, rank: int) -> torch.Tensor:
    """Row k of an A [rank, ...] or row o of a B [rows, rank] holds (row + 1) / 100."""
    return ((torch.arange(rows) + 1) / 100.0)[:, None].repeat(1, rank)


@dataclass(frozen=True)
class Case:
    """``write`` makes the adapter in a folder; ``change`` is what it must come to."""

    write: Callable[[Path], Path]
    change: Change


def const(change: Change, tensors: Tensors | None = None, **config: Any) -> Case:
    return Case(lambda folder: write_adapter(folder, tensors or q_pairs(), **config), change)


def renamed(old: str, new: str) -> Tensors:
    return {key.replace(old, new): tensor for key, tensor in q_pairs().items()}


def kohya(folder: Path) -> Path:
    folder.mkdir()
    tensors = {}
    for layer in (0, 1):
        name = f"lora_te_model_layers_{layer}_self_attn_q_proj"
        tensors[f"{name}.lora_down.weight"] = torch.full((2, 8), 0.1)
        tensors[f"{name}.lora_up.weight"] = torch.full((8, 2), 0.1)
        tensors[f"{name}.alpha"] = torch.tensor(16.0)
    save_file(tensors, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


def sharded(folder: Path) -> Path:
    write_adapter(folder, q_pairs())
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    homes = {}
    for number, half in enumerate("AB", start=1):
        name = f"adapter_model-0000{number}-of-00002.safetensors"
        part = {key: t for key, t in tensors.items() if f"lora_{half}" in key}
        save_file(part, folder / name)
        homes |= dict.fromkeys(part, name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def fused_case() -> Case:
    """B's rows are ramps: any wrong slice, order or transpose changes the numbers."""
    names = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
    sizes = {"q": 8, "k": 4, "v": 4, "gate": 16, "up": 16}
    a, tensors, entries = ramp(2, 8), {}, []
    for module, parts in names.items():
        b = ramp(sum(sizes[part] for part in parts), 2)
        tensors[f"{STANDARD.format(layer=0, module=module)}.lora_A.weight"] = a
        tensors[f"{STANDARD.format(layer=0, module=module)}.lora_B.weight"] = b
        first = 0
        for part in parts:
            rows = b[first : first + sizes[part]]
            parent = module.partition(".")[0]
            entries.append((f"model.layers.0.{parent}.{part}_proj", 2 * rows @ a))
            first += sizes[part]
    return const(add(*entries), tensors, target_modules=["qkv_proj", "gate_up_proj"])


def slices_case() -> Case:
    """q, k and v of one fused linear with ranks 2, 4, 1 and scalings 2, 1, 8."""
    stem = "base_model.model.model.layers.0.self_attn"
    tensors = pair(f"{stem}.q_proj", 8, 8, rank=2) | pair(f"{stem}.k_proj", 8, 4, rank=4)
    tensors |= pair(f"{stem}.v_proj", 8, 4, rank=1)
    changes = {"q": 0.04, "k": 0.04, "v": 0.08}
    change = add(*((f"model.layers.0.self_attn.{n}_proj", v) for n, v in changes.items()))
    ranks, alphas = {"k_proj": 4, "v_proj": 1}, {"k_proj": 4, "v_proj": 8}
    return const(change, tensors, rank_pattern=ranks, alpha_pattern=alphas)


def bias_case() -> Case:
    tensors = q_pairs() | {f"{q(0)}.lora_B.bias": torch.full((8,), 0.5)}

    def change(model: Any) -> None:
        q_add(0.04, 0.04)(model)
        bias = torch.nn.Parameter(torch.full((8,), 1.0))
        model.get_submodule("model.layers.0.self_attn.q_proj").bias = bias

    return const(change, tensors, lora_bias=True)


def embedding_case(vocab: int) -> Case:
    stem = "base_model.model.model.embed_tokens"
    tensors = {
        f"{stem}.lora_embedding_A": (torch.arange(vocab) / 100.0).repeat(2, 1),
        f"{stem}.lora_embedding_B": torch.full((8, 2), 0.1),
    }
    per_token = torch.arange(vocab)[:, None] / 100.0 * 0.4
    return const(add(("model.embed_tokens", per_token.repeat(1, 8))), tensors)


def head_case(vocab: int) -> Case:
    stem = "base_model.model.lm_head"
    a, b = ramp(2, 8), ramp(vocab, 2)
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    return const(add(("lm_head", 2 * b @ a)), tensors)


def saved_case(vocab: int) -> Case:
    """Both matrices replaced by others, beside plain LoRA."""
    generator = torch.Generator().manual_seed(9)
    head, embedding = (torch.randn(vocab, 8, generator=generator) for _ in range(2))
    tensors = q_pairs() | {
        "base_model.model.lm_head.weight": head,
        "base_model.model.model.embed_tokens.weight": embedding,
    }

    def change(model: Any) -> None:
        q_add(0.04, 0.04)(model)
        model.lm_head.weight.data = head
        model.model.embed_tokens.weight.data = embedding

    return const(change, tensors, modules_to_save=["lm_head", "embed_tokens"])


LAYER0 = "layers.0.self_attn.q_proj"
STEM = "base_model.model.model.layers"
CASES: dict[str, Case] = {
    "patterns of rank and alpha": const(
        q_add(0.16, 0.04),
        pair(q(0), 8, 8, rank=4) | pair(q(1), 8, 8, rank=2),
        rank_pattern={LAYER0: 4},
        alpha_pattern={LAYER0: 16},
    ),
    "rank-stabilised": const(q_add(*[4 / math.sqrt(2) * 2 * 0.01] * 2), use_rslora=True),
    "bias inside LoRA": bias_case(),
    "targets as a regex": const(q_add(0.04, 0.04), target_modules=r".*layers\.0\..*q_proj"),
    "targets all-linear": const(q_add(0.04, 0.04), target_modules="all-linear"),
    "targets as full paths": const(
        q_add(0.04, 0.04), target_modules=["model.layers.0.self_attn.q_proj"]
    ),
    "targets with a parent": const(q_add(0.04, 0.04), target_modules=["self_attn.q_proj"]),
    "fan_in_fan_out on linears": const(
        add(("model.layers.0.self_attn.q_proj", 2 * ramp(8, 2) @ ramp(2, 8))),
        {f"{q(0)}.lora_A.weight": ramp(2, 8), f"{q(0)}.lora_B.weight": ramp(8, 2)},
        fan_in_fan_out=True,
    ),
    "prefix of the headless class": const(
        q_add(0.04, 0.04), renamed(STEM, "base_model.model.layers")
    ),
    "bare names": const(q_add(0.04, 0.04), renamed(STEM, "model.layers")),
    "bare layers": const(q_add(0.04, 0.04), renamed(STEM, "layers")),
    "adapter name in keys": const(q_add(0.04, 0.04), renamed(".weight", ".my-adapter_0.weight")),
    "fused names": fused_case(),
    "slices of different ranks": slices_case(),
    "sharded": Case(sharded, q_add(0.04, 0.04)),
    "mixed dtypes": const(
        q_add(0.25, 0.25),
        {
            f"{q(n)}.lora_{half}.weight": torch.full(shape, value, dtype=dtype)
            for n in (0, 1)
            for half, shape, value, dtype in (
                ("A", (2, 8), 0.125, torch.bfloat16),
                ("B", (8, 2), 0.5, torch.float32),
            )
        },
    ),
    "rank 1": const(q_add(0.04, 0.04), q_pairs(rank=1), r=1),
    "rank 3": const(q_add(0.04, 0.04), q_pairs(rank=3), r=3),
    "rank 4": const(q_add(0.04, 0.04), q_pairs(rank=4), r=4),
    "alora tokens null": const(q_add(0.04, 0.04), alora_invocation_tokens=None),
    "kohya": Case(kohya, q_add(0.16, 0.16)),
}


def _greedy(model: Any) -> tuple[list[int], list[torch.Tensor]]:
    ids, logits = list(PROMPT), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits.append(model(torch.tensor([ids])).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :], logits


def _serve(base: Path, folders: dict[str, Path], world_size: int, vocab: int) -> dict[str, Any]:
    """(tokens, logits) of the prompt on each adapter, all in one batch."""
    config = EngineConfig(
        model=str(base),
        tensor_parallel_size=world_size,
        dtype="float32",
        threads=1,
        max_model_len=32,
        block_size=4,
        lora=LoraConfig(
            adapters={name: str(folder) for name, folder in folders.items()},
            max_loras=len(folders),
            max_lora_rank=4,
        ),
    )
    ranks = LockstepRanks(config)
    try:
        rids = {}
        for name in folders:
            rids[name] = ranks.open(PROMPT, PARAMS, AdapterKey(name, FIRST_GENERATION))
            assert ranks.wait_copies(rids[name]) is None
        found: dict[str, Any] = {name: ([], []) for name in folders}
        for step in range(NUM_TOKENS):
            rows = [(rid, 1 if step else len(PROMPT)) for rid in rids.values()]
            result = ranks.step(rows)[0]
            for name, rid in rids.items():
                sampled = result.sampled[rid]
                assert sampled.logprobs is not None
                logits = torch.empty(vocab)
                logits[list(sampled.logprobs.top_ids)] = torch.tensor(sampled.logprobs.top)
                found[name][0].append(sampled.token)
                found[name][1].append(logits)
        return found
    finally:
        ranks.close()


def _check(folder: Path, cases: dict[str, Case], tps: Sequence[int], **config: Any) -> None:
    torch.set_num_threads(1)
    path = make_tiny_model(
        folder / "base",
        "llama",
        seed=0,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=4,
        max_position_embeddings=64,
        **config,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain = _greedy(base)[1][0]
    folders = {name: case.write(folder / f"{n}") for n, (name, case) in enumerate(cases.items())}
    wanted = {}
    for name, case in cases.items():
        model = copy.deepcopy(base)
        case.change(model)
        wanted[name] = _greedy(model)
        assert float((wanted[name][1][0] - plain).abs().max()) > 1e-3, f"{name}: changes nothing"
    for tp in tps:
        found = _serve(path, folders, tp, config["vocab_size"])
        for name, (tokens, logits) in wanted.items():
            for got, right in zip(found[name][1], logits, strict=True):
                worst = float((got - right).abs().max() / right.abs().max())
                assert worst < 1e-5, f"{name}, tp {tp}: logits are off by {worst:.1e}"
            assert found[name][0] == tokens, f"{name}, tp {tp}"


def test_every_case_that_is_accepted_is_right(tmp_path: Path) -> None:
    cases = CASES | {"embedding": embedding_case(32), "head": head_case(32)}
    cases["saved ends"] = saved_case(32)
    _check(tmp_path, cases, (1, 2), vocab_size=32, num_key_value_heads=2)


def test_one_key_value_head_on_two_ranks(tmp_path: Path) -> None:
    """Each rank holds its half of q and the whole of k and v."""
    stem = "base_model.model.model.layers.0.self_attn"
    a, sizes = ramp(2, 8), {"q": 8, "k": 2, "v": 2}
    cases = {}
    for names in ("qkv", "v"):
        tensors: Tensors = {}
        entries = []
        for name in names:
            b = ramp(sizes[name], 2)
            tensors[f"{stem}.{name}_proj.lora_A.weight"] = a
            tensors[f"{stem}.{name}_proj.lora_B.weight"] = b
            entries.append((f"model.layers.0.self_attn.{name}_proj", 2 * b @ a))
        cases[names] = const(add(*entries), tensors)
    _check(tmp_path, cases, (1, 2), vocab_size=32, num_key_value_heads=1)


def test_a_vocabulary_that_no_number_of_ranks_divides(tmp_path: Path) -> None:
    """The last id has the largest change, and the padding beside it none that shows."""
    cases = {"embedding": embedding_case(33), "head": head_case(33), "saved": saved_case(33)}
    _check(tmp_path, cases, (1, 2, 4), vocab_size=33, num_key_value_heads=2)
