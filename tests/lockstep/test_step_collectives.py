"""What a step calls beside its forward: nothing, unless an adapter of its rows is in no slot."""

from __future__ import annotations

from pathlib import Path

import torch
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams


def test_only_a_step_with_a_miss_calls_a_collective_beside_the_models_own(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", "llama", seed=2)
    adapters = {
        name: str(make_adapter(tmp_path / name, tmp_path / "model", rank=4, seed=seed))
        for seed, name in enumerate("ab")
    }
    config = EngineConfig(
        model=str(tmp_path / "model"),
        tensor_parallel_size=2,
        threads=1,
        max_model_len=64,
        lora=LoraConfig(adapters=adapters, max_loras=2),
    )
    ranks = LockstepRanks(config)

    def calls(*rows: tuple[int, int]) -> dict[str, int]:
        ranks.calls.clear()
        results = ranks.step(rows)
        assert all(len(result.sampled) == len(rows) for result in results)
        return dict(ranks.calls)

    def open_on(name: str | None) -> int:
        key = None if name is None else AdapterKey(name, FIRST_GENERATION)
        return ranks.open(range(3, 6), SamplingParams(max_tokens=20, temperature=0), key)

    try:
        base, a, b = map(open_on, (None, "a", "b"))
        assert ranks.wait_copies(a) is None and ranks.wait_copies(b) is None
        own = calls((base, 3))
        # Two sums a layer and one in the embedding; logits to rank 0, and its tokens to all.
        layers = ranks.engines[0].model_config.num_layers
        assert own == {"all_reduce": 2 * layers + 1, "gather": 1, "broadcast": 1}
        assert calls((base, 1), (a, 3), (b, 3)) == {**own, "agree": 1}, "one for both misses"
        for _ in range(3):
            assert calls((base, 1), (a, 1), (b, 1)) == own
        assert calls((base, 1), (open_on("a"), 3)) == own, "its adapter is resident"
        ranks.remove(b)
        again = open_on("b")
        assert calls((base, 1), (again, 3)) == own, "nobody held it, and it was not evicted"
    finally:
        ranks.close()
