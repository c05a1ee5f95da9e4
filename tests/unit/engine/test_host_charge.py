"""What holding an adapter costs: one number, equal on all ranks, that no rank's copy exceeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import q_pairs, random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

KEY = AdapterKey("x", 1)
Q_BYTES = 2 * (3 * 4 * 8 + 16 * 4) * 4
"""q alone on one rank: two layers of A [3 slices * rank 4, 8 in] and B [16 out, rank 4]."""


def in_bytes(capacity: int, **how: int) -> LoraSpec:
    return tiny_spec(**how).apply_yaml_overrides({"cpu_unit": "bytes", "cpu_capacity": capacity})


def stores(spec: LoraSpec, world_size: int) -> Sequence[LoraAdapterStore]:
    torch.set_num_threads(1)
    return [
        LoraAdapterStore(spec, rank, world_size, page_locked=False, dtype=torch.float32)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("world_size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1)])
def test_an_adapter_costs_the_bytes_of_its_largest_ranks_copy_on_every_rank(
    tmp_path: Path, world_size: int, kv_heads: int, biased: bool
) -> None:
    spec = in_bytes(1 << 20, kv_heads=kv_heads)
    tensors = random_pairs(spec, rank=2, seed=0)
    if biased:
        factors = {name: len(t) for name, t in tensors.items() if name.endswith("lora_B.weight")}
        tensors |= {n.replace("weight", "bias"): torch.ones(size) for n, size in factors.items()}
    write_adapter(tmp_path, tensors, target_modules="all-linear", lora_bias=biased)
    ranks = stores(spec, world_size)
    records = [store.check("x", str(tmp_path)) for store in ranks]
    sizes = [
        store.read(KEY, record).num_bytes for store, record in zip(ranks, records, strict=True)
    ]
    assert {store.charge(records[0]) for store in ranks} == {max(sizes)}
    assert [store.shard_bytes(records[0]) for store in ranks] == sizes
    # A row-parallel output's bias is added on one rank only.
    assert (len(set(sizes)) > 1) == (biased and world_size > 1)


def test_what_a_copys_size_follows_from_is_what_ranks_compare(tmp_path: Path) -> None:
    (store,) = stores(tiny_spec(), 1)
    plain = q_pairs(store.spec)
    biases = {n.replace("weight", "bias"): torch.ones(8) for n in plain if "lora_B" in n}
    write_adapter(tmp_path / "plain", plain)
    write_adapter(tmp_path / "biased", plain | biases, lora_bias=True)
    records = [store.check("x", str(tmp_path / name)) for name in ("plain", "biased")]
    assert records[0].targets == records[1].targets
    assert records[0].decides != records[1].decides
    assert records[1].changes == ("self_attn.qkv_proj", "the bias of self_attn.qkv_proj")


def test_in_adapters_each_costs_one(tmp_path: Path) -> None:
    (store,) = stores(tiny_spec(), 1)
    write_adapter(tmp_path, q_pairs(store.spec))
    assert store.charge(store.check("x", str(tmp_path))) == 1


def make_pool(spec: LoraSpec) -> LoraAdapterPool:
    torch.set_num_threads(1)
    return LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=lambda report: None,
    )


def test_a_load_larger_than_the_whole_tier_is_refused_with_both_sizes(tmp_path: Path) -> None:
    pool = make_pool(in_bytes(Q_BYTES - 1))
    try:
        write_adapter(tmp_path, q_pairs(pool.spec))
        wanted = rf"'x' takes {Q_BYTES} bytes .* wanted at most {Q_BYTES - 1}"
        with pytest.raises(AdapterError, match=wanted):
            pool.loads.preload([(KEY, str(tmp_path))])
        causes: SimpleQueue[str | None] = SimpleQueue()
        pool.loads.begin(KEY, str(tmp_path), lambda cause, *_: causes.put(cause))
        assert "raise --max-cpu-lora-bytes" in str(causes.get(timeout=60))
    finally:
        pool.close()
    assert causes.empty()


def test_a_bound_in_bytes_under_which_the_slots_cannot_be_filled_stops_the_start(
    tmp_path: Path,
) -> None:
    keys = [AdapterKey(name, 1) for name in "xyz"]
    write_adapter(tmp_path, q_pairs(tiny_spec()))
    configured = [(key, str(tmp_path)) for key in keys]
    small = make_pool(in_bytes(2 * Q_BYTES - 1))
    try:
        with pytest.raises(
            AdapterError, match=f"wanted at least {2 * Q_BYTES}: what the 2 largest"
        ):
            small.loads.preload(configured)
    finally:
        small.close()
    enough = make_pool(in_bytes(2 * Q_BYTES))
    try:
        enough.loads.preload(configured)
        assert enough.reports.debug_state().cpu_cache == tuple(keys[:2])
        assert enough.reports.cpu_cache_state().used == 2 * Q_BYTES
    finally:
        enough.close()
