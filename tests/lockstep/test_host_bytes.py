"""A bound in bytes from the configuration is the CPU cache's on every rank: requests on more
adapters than it holds all run, and no rank's memory for copies passes it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

NAMES = "abc"


def _ranks(folder: Path, **cpu_cache: int) -> LockstepRanks:
    adapters = {name: str(folder / name) for name in NAMES}
    config = EngineConfig(
        model=str(folder / "model"),
        tensor_parallel_size=2,
        threads=1,
        max_model_len=64,
        lora=LoraConfig(adapters=adapters, max_loras=1, **cpu_cache),
    )
    return LockstepRanks(config)


def test_a_tier_in_bytes_serves_more_adapters_than_it_holds_within_its_bound(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", "llama", seed=2)
    for seed, name in enumerate(NAMES):
        make_adapter(tmp_path / name, tmp_path / "model", rank=4, seed=seed)
    in_adapters = _ranks(tmp_path, max_cpu_loras=3)
    try:
        for name in NAMES:
            rid = in_adapters.open(range(3, 9), SamplingParams(max_tokens=2), _key(name))
            assert in_adapters.wait_copies(rid) is None
        stats = [state.lora.reports.stats()[0] for state in in_adapters.states if state.lora]
        sizes = [each.cpu_cache.memory_bytes // 3 for each in stats]
    finally:
        in_adapters.close()
    bound = 2 * max(sizes) + max(sizes) // 2
    ranks = _ranks(tmp_path, max_cpu_lora_bytes=bound)
    try:
        for name in NAMES * 2:
            rid = ranks.open(range(3, 9), SamplingParams(max_tokens=2), _key(name))
            assert ranks.wait_copies(rid) is None
            ranks.step([(rid, 6)])
            ranks.remove(rid)
        reports = [
            state.report(0, waiting=0, running=0, steps=6, preemptions=0, gap_us=0)
            for state in ranks.states
        ]
        for report in reports:
            assert report.host is not None
            assert (report.host.unit, report.host.capacity) == ("bytes", bound)
            assert report.host.used == 2 * max(sizes)
            assert report.host.peak_bytes <= report.host.peak <= bound
            assert report.cpu_cache == reports[0].cpu_cache and len(report.cpu_cache) == 2
            assert report.steps_waited_for_read == 0
    finally:
        ranks.close()


def _key(name: str) -> AdapterKey:
    return AdapterKey(name, FIRST_GENERATION)
