"""The CPU cache's bound is hard: a thousand queued requests on a thousand adapters, two ranks, real
reader threads. Memory for copies never passes the bound, reads in flight included, and every
request gets there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.admission_simulation import AdmissionSim

from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

REQUESTS = 1000
SHARD_BYTES = 2 * (3 * 4 * 8 + 8 * 4) * 4
"""Two layers of one column-parallel target on one of two ranks: A whole, half of B's rows."""


@pytest.mark.parametrize(
    ("unit", "capacity"), [("adapters", 3), ("bytes", 3 * SHARD_BYTES + SHARD_BYTES // 2)]
)
def test_a_thousand_queued_requests_on_a_thousand_adapters_stay_within_the_bound(
    tmp_path: Path, unit: str, capacity: int
) -> None:
    spec = tiny_spec(slots=2, cpu_capacity=3).apply_yaml_overrides(
        {"cpu_unit": unit, "cpu_capacity": capacity}
    )
    sim = AdmissionSim(spec, world_size=2, max_num_seqs=8)
    try:
        _run(sim, spec, tmp_path)
    finally:
        sim.close()


def _run(sim: AdmissionSim, spec: LoraSpec, folder: Path) -> None:
    path = str(write_adapter(folder, q_pairs(spec)))
    keys = [AdapterKey(f"a{i}", 1) for i in range(REQUESTS)]
    sim.serve([(key, path) for key in keys])
    # Youngest first, so that what is held from the start is what comes last.
    for rid, key in enumerate(reversed(keys)):
        sim.arrive(rid, key, output=2)
    while len(sim.requests):
        if not sim.step().rows:
            sim.wait_for_a_copy()
        assert len({pool.reports.cpu_cache_hash() for pool in sim.pools}) == 1
        assert len(sim.leader.reports.debug_state().cpu_cache) <= 3
    assert all(visit.left is not None for visit in sim.visits.values())
    for pool in sim.pools:
        state = pool.reports.cpu_cache_state()
        assert state.used <= state.peak <= state.capacity
        assert state.memory_bytes <= state.peak_bytes <= 3 * SHARD_BYTES
        copies = [pool.store.get(key) for key in pool.reports.debug_state().cpu_cache]
        assert {copy.num_bytes for copy in copies if copy is not None} == {SHARD_BYTES}
        assert pool.reports.steps_waited_for_read == 0
