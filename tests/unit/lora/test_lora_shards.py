"""A rank's CPU copy is its part of the adapter: all ranks' parts together are the whole, at any
tp.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar_tp.common.errors import ConfigError
from mstar_tp.lora.format.checkpoint import AdapterFile, check_adapter_file
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import read_adapter
from mstar_tp.lora.spec import LoraParallel, LoraSpec
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

KEY = AdapterKey("x", 1)


def copies(spec: LoraSpec, file: AdapterFile, world_size: int) -> list[LoadedAdapter]:
    return [
        read_adapter(
            spec,
            KEY,
            file,
            rank=rank,
            world_size=world_size,
            dtype=torch.float32,
            page_locked=False,
        )
        for rank in range(world_size)
    ]


def adapter_file(spec: LoraSpec, folder: Path) -> AdapterFile:
    tensors = random_pairs(spec, rank=3, seed=1)
    return check_adapter_file(spec, "x", write_adapter(folder, tensors, r=3, lora_alpha=6))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shards_reassemble_to_the_adapter_also_where_kv_heads_are_replicated(
    tmp_path: Path, world_size: int, kv_heads: int
) -> None:
    spec = tiny_spec(kv_heads=kv_heads)
    file = adapter_file(spec, tmp_path)
    (whole,) = copies(spec, file, 1)
    parts = copies(spec, file, world_size)
    for target in spec.targets:
        if target.parallel is LoraParallel.ROW:
            a = torch.cat([part.a[target.name] for part in parts], dim=2)
            assert torch.equal(a, whole.a[target.name])
            assert all(torch.equal(p.b[target.name], whole.b[target.name]) for p in parts)
            continue
        assert all(torch.equal(p.a[target.name], whole.a[target.name]) for p in parts)
        rebuilt = torch.full_like(whole.b[target.name], torch.nan)
        for rank, part in enumerate(parts):
            first, full = 0, 0
            for out, rows in zip(
                target.out_slices, target.out_ranges(rank, world_size), strict=True
            ):
                mine = part.b[target.name][:, first : first + len(rows)]
                place = rebuilt[:, full + rows.start : full + rows.stop]
                assert torch.equal(place[~place.isnan()], mine[~place.isnan()])
                place.copy_(mine)
                first, full = first + len(rows), full + out.out_features
            assert first == part.b[target.name].shape[1]
        assert torch.equal(rebuilt, whole.b[target.name])


def test_the_digest_is_the_same_on_every_rank_of_every_tp(tmp_path: Path) -> None:
    spec = tiny_spec()
    file = adapter_file(spec, tmp_path)
    assert len({copy.digest for tp in (1, 2, 4) for copy in copies(spec, file, tp)}) == 1


def test_ranks_are_padded_with_zeros_to_the_slots_rank(tmp_path: Path) -> None:
    spec = tiny_spec(max_rank=4)
    (copy,) = copies(spec, adapter_file(spec, tmp_path), 1)
    for target in spec.targets:
        a = copy.a[target.name].unflatten(1, (len(target.out_slices), 4))
        assert not a[:, :, 3].any() and a[:, :, :3].any()
        assert not copy.b[target.name][:, :, 3].any()


def test_scaling_is_folded_into_b_before_the_one_cast(tmp_path: Path) -> None:
    spec = tiny_spec(max_rank=4)
    tensors = random_pairs(spec, rank=3, seed=2)
    folder = write_adapter(tmp_path, tensors, r=3, lora_alpha=4)
    file = check_adapter_file(spec, "x", folder)
    copy = read_adapter(
        spec, KEY, file, rank=0, world_size=1, dtype=torch.bfloat16, page_locked=False
    )
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    wanted = (tensors[name] * (4 / 3)).to(torch.bfloat16)
    assert torch.equal(copy.b["mlp.down_proj"][1, :, :3], wanted)


def test_a_tp_that_cannot_deal_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="q_proj"):
        tiny_spec().targets[0].out_ranges(0, 3)


def test_a_refused_override_leaves_the_spec_and_names_the_keys() -> None:
    spec = tiny_spec()
    with pytest.raises(ConfigError, match=r"lora\.slotz.*slots, max_rank"):
        spec.apply_yaml_overrides({"slots": 1, "slotz": 3})
    with pytest.raises(ConfigError, match="cpu_capacity"):
        spec.apply_yaml_overrides({"slots": 99})
    assert spec.apply_yaml_overrides({"slots": 1}).slots == 1 and spec.slots == 2
