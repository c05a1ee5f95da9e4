"""Base rows of a mixed batch are the base's, bit for bit: as in that step without adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.tiny_models import (
    FAMILIES,
    MOE_FAMILIES,
    MOE_TARGETS,
    Family,
    make_adapter,
    make_tiny_model,
)
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

ROWS = ["one", None, "two", None, None, "one"]
PARAMS = SamplingParams(max_tokens=8, temperature=0, logprobs=1 << 20)


@pytest.fixture(scope="module", params=(*FAMILIES, *MOE_FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family)
    make_tiny_model(folder / "model", family, seed=5)
    for seed, (name, rank) in enumerate({"one": 4, "two": 16}.items()):
        make_adapter(folder / name, folder / "model", rank=rank, targets=MOE_TARGETS, seed=seed)
    return folder


def _run(folder: Path, world_size: int, dtype: str, names: list[str | None]) -> list[list[object]]:
    """A prefill step of all rows, then two decode steps; what each base row of ROWS reported."""
    config = EngineConfig(
        model=str(folder / "model"),
        tensor_parallel_size=world_size,
        dtype=dtype,  # type: ignore[arg-type]
        threads=1,
        max_model_len=64,
        lora=LoraConfig(
            adapters={n: str(folder / n) for n in ("one", "two")}, max_loras=2, max_lora_rank=32
        ),
    )
    ranks = LockstepRanks(config)
    try:
        rids = []
        for i, name in enumerate(names):
            key = None if name is None else AdapterKey(name, FIRST_GENERATION)
            rids.append(ranks.open(range(3 + i, 20 + 2 * i), PARAMS, key))
            assert key is None or ranks.wait_copies(rids[-1]) is None
        steps = [[(rid, 17 + i) for i, rid in enumerate(rids)]] + 2 * [[(rid, 1) for rid in rids]]
        seen = []
        for rows in steps:
            result = ranks.step(rows)[0]
            assert not result.failed
            base = [rid for rid, name in zip(rids, ROWS, strict=True) if name is None]
            seen.append([result.sampled[rid] for rid in base])
            adapted = [r.slots[rid] for r in [result] for rid in rids if rid not in base]
            assert all(adapted) == any(names)
        return seen  # type: ignore[return-value]
    finally:
        ranks.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_base_rows_are_bit_equal_with_and_without_adapters_beside_them(
    folder: Path, world_size: int, dtype: str
) -> None:
    mixed = _run(folder, world_size, dtype, ROWS)
    alone = _run(folder, world_size, dtype, [None] * len(ROWS))
    # Sampled holds the token and every logit: equality is exact.
    assert mixed == alone
