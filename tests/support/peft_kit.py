"""References for served rows: transformers + PEFT, and the engine on ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.engine.sampling.sampler import Sampled
from mstar_tp.wire.reports import TokenLogprobs
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams
from support.lockstep_ranks import LockstepRanks

VOCAB = 211
TOLERANCE = 1e-4
NUM_DECODED = 3
PARAMS = SamplingParams(max_tokens=NUM_DECODED + 1, temperature=0, logprobs=1 << 20)
TOKENS = (0, 7, 106, 107, 199, 210)
"""Ids on both ranks of two, at the edges of their parts."""


@dataclass
class Case:
    """One row: its adapter, its prompt, the tokens fed after it and the logits after each."""

    name: str | None
    prompt: list[int]
    fed: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return [*TOKENS, *drawn][:length]


def tune(model: Any, seed: int) -> None:
    """Whatever the adapter trains gets values that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        trains = ("lora_", "trainable_tokens_delta", "modules_to_save")
        if not any(part in name for part in trains):
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        size = 0.3 * float(parameter.detach().std()) if "lora_" not in name else 0.1
        with torch.no_grad():
            parameter.add_(noise * max(size, 0.01))


def expect(case: Case, base: Any, folder: Path | None) -> None:
    """The answer of transformers + PEFT, from the adapter's file."""
    import peft

    model = copy.deepcopy(base)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, str(folder))
    model.eval()
    with torch.no_grad():
        for _ in range(NUM_DECODED):
            logits = model(torch.tensor([[*case.prompt, *case.fed]])).logits[0, -1]
            case.logits.append(logits)
            case.fed.append(int(logits.argmax()))


def logits_of(sampled: Sampled) -> torch.Tensor:
    """The whole vocabulary's, from what the row reports."""
    assert sampled.logprobs is not None
    return logits_told(sampled.logprobs)


def logits_told(told: TokenLogprobs) -> torch.Tensor:
    """The whole vocabulary's, where all of it was asked for."""
    logits = torch.empty(len(told.top_ids))
    logits[list(told.top_ids)] = torch.tensor(told.top)
    return logits


def assert_close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    worst = float((got - wanted).abs().max() / wanted.abs().max())
    assert worst < TOLERANCE, f"{what}: off by {worst:.2e}"


def engine_config(
    base: Path, folders: dict[str, Path], world_size: int, slots: int | None = None
) -> EngineConfig:
    return EngineConfig(
        model=str(base),
        tensor_parallel_size=world_size,
        dtype="float32",
        threads=1,
        max_model_len=64,
        block_size=4,
        lora=LoraConfig(
            adapters={name: str(folder) for name, folder in folders.items()},
            max_loras=slots or len(folders),
            max_lora_rank=8,
            max_lora_saved_rows=VOCAB,
        ),
    )


def check_rows(
    cases: Sequence[Case], base: Path, folders: dict[str, Path], world_size: int
) -> None:
    """Run the cases in one batch on ``world_size`` ranks and compare every row's logits."""
    ranks = LockstepRanks(engine_config(base, folders, world_size))
    try:
        rids = []
        for case in cases:
            key = None if case.name is None else AdapterKey(case.name, FIRST_GENERATION)
            rids.append(ranks.open(case.prompt, PARAMS, key))
            assert key is None or ranks.wait_copies(rids[-1]) is None
        # Half of the prompts whole, the others in two chunks; then one token a row.
        first = [len(c.prompt) if i % 2 else len(c.prompt) // 2 for i, c in enumerate(cases)]
        steps = [[(rid, n) for rid, n in zip(rids, first, strict=True)]]
        rest = [len(c.prompt) - n or 1 for c, n in zip(cases, first, strict=True)]
        steps.append([(rid, n) for rid, n in zip(rids, rest, strict=True)])
        steps += [[(rid, 1) for rid in reversed(rids)]] * (NUM_DECODED - 1)
        seen: dict[int, list[torch.Tensor]] = {rid: [] for rid in rids}
        for rows in steps:
            result = ranks.step(rows)[0]
            assert not result.failed, result.failed
            for rid, sampled in result.sampled.items():
                seen[rid].append(logits_of(sampled))
    finally:
        ranks.close()
    for rid, case in zip(rids, cases, strict=True):
        for position, wanted in enumerate(case.logits):
            assert_close(seen[rid][position], wanted, f"{case.name}, token {position}")
