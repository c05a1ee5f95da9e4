"""A row of non-finite logits fails by itself, on every rank alike; its neighbours go on."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.engine.sampling.sampler import NOT_FINITE
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams


def test_an_adapter_that_overflows_fails_its_own_row_on_both_ranks(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", "llama", seed=2)
    folder = make_adapter(tmp_path / "huge", tmp_path / "model", rank=4)
    weights = folder / "adapter_model.safetensors"
    save_file({k: torch.full_like(v, 3e18) for k, v in load_file(weights).items()}, weights)
    config = EngineConfig(
        model=str(tmp_path / "model"),
        tensor_parallel_size=2,
        threads=1,
        max_model_len=64,
        lora=LoraConfig(adapters={"huge": str(folder)}, max_loras=1),
    )
    ranks = LockstepRanks(config)
    try:
        params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9)
        base = ranks.open(range(3, 9), params)
        huge = ranks.open(range(3, 9), params, AdapterKey("huge", FIRST_GENERATION))
        assert ranks.wait_copies(huge) is None
        results = ranks.step([(base, 6), (huge, 6)])
        assert results[0].failed == {huge: NOT_FINITE}
        assert all(set(result.failed) == {huge} for result in results)
        assert all(set(result.sampled) == {base} for result in results)
        ranks.remove(huge)
        later = [ranks.step([(base, 1)]) for _ in range(3)]
        assert all(result.sampled[base].logprobs is None for step in later for result in step)
        tokens = [engine.requests[base].tokens for engine in ranks.engines]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == 6 + 4
    finally:
        ranks.close()
