"""The delta operators keep torch's rules: fakes of the right shape, one node to torch.compile, and
tables that a bucket holds or refuses.
"""

from __future__ import annotations

import pytest
import torch
from support.delta_cases import DeltaCase, DeltaShape, mixed_slots, rows_by_slot, tiled
from support.vocab_cases import VocabCase

from mstar_tp.common.errors import LockstepError
from mstar_tp.kernels.staging import ALIGNED
from mstar_tp.kernels.triton import launch
from mstar_tp.lora.device import ops
from mstar_tp.lora.device.tiles import TileBuffer, TileSizes

CPU = torch.device("cpu")
SHAPE = DeltaShape(
    in_features=24, out_sizes=(20, 8), max_rank=8, ranks=(8, 3, 0), dtype=torch.bfloat16
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_way_equals_float64(dtype: torch.dtype) -> None:
    for out_sizes, ranks in (((300,), (1, 128, 0, 33)), ((40, 7, 7), (5, 2))):
        shape = DeltaShape(
            in_features=70, out_sizes=out_sizes, max_rank=128, ranks=ranks, dtype=dtype
        )
        slots = mixed_slots(300, len(ranks), seed=2)
        rows = tiled(slots, CPU)
        assert rows is not None
        DeltaCase(shape, CPU, 2).check(slots, rows)


def test_operators_pass_torchs_own_checks() -> None:
    case, rows = DeltaCase(SHAPE, CPU, 0), tiled([1, 0, 2, 2, 3], CPU)
    assert rows is not None
    x, y = case.rows(5)
    tables = rows.order_R, rows.tiles_N3, case.ranks
    checks = ("test_schema", "test_faketensor")
    case.a.nan_to_num_()  # torch compares what the operators leave unchanged
    case.b.nan_to_num_()
    everything = (y, x, case.a, case.b, *tables, case.blocks, rows.block_rows, False)
    torch.library.opcheck(torch.ops.mstar_lora.apply.default, everything, test_utils=checks)
    h = torch.zeros(1, 4, 16)
    expanded = (y, h, case.b, *tables, case.blocks, rows.block_rows)
    torch.library.opcheck(torch.ops.mstar_lora.expand.default, expanded, test_utils=checks)
    shrunk = (x, case.a, *tables, 8, rows.block_rows, 2)
    with torch._subclasses.FakeTensorMode() as fake:
        made = torch.ops.mstar_lora.shrink(
            *(fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in shrunk)
        )
    real = torch.ops.mstar_lora.shrink(*shrunk)
    assert (made.shape, made.dtype) == (real.shape, real.dtype)


def test_the_other_operators_are_right_on_the_cpu_and_pass_torchs_own_checks() -> None:
    slots = mixed_slots(40, 4, seed=5)
    rows = tiled(slots, CPU)
    assert rows is not None
    case = VocabCase(CPU, torch.float16, seed=1, ranks=(24, 3, 0, 17), saved=(0, 7, 1, 50))
    case.check(slots, rows)
    case = VocabCase(CPU, torch.float32, seed=1, ranks=(2, 2), saved=(3, 3), max_rank=2)
    rows = tiled([1, 0, 2], CPU)
    assert rows is not None
    x, tables = torch.ones(3, 40), (rows.order_R, rows.tiles_N3)
    saved = case.chosen, case.rows, case.counts
    ids, block = torch.tensor([50, 51, 99]), rows.block_rows
    everything = {
        "embed": (x, ids, case.a, case.b, *saved, *tables, case.ranks, 50, block),
        "head_rows": (torch.ones(3, 50), x, *saved, *tables, block),
        "add_bias": (x, case.bias, *tables, block),
        "norm": (x.clone(), x, case.bias, case.replaced, *tables, 1e-6, True, block),
    }
    for name, arguments in everything.items():
        operator = getattr(torch.ops.mstar_lora, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_delta_is_one_node_to_torch_compile() -> None:
    case, rows = DeltaCase(SHAPE, CPU, 0), tiled([1, 0, 2, 2, 3], CPU)
    assert rows is not None
    x, y = case.rows(5)
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def add(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.ops.mstar_lora.apply(
            y,
            x,
            case.a,
            case.b,
            rows.order_R,
            rows.tiles_N3,
            case.ranks,
            case.blocks,
            rows.block_rows,
            False,
        )
        return y

    compiled = torch.compile(add, backend=backend, fullgraph=True)
    assert torch.equal(compiled(y.clone(), x), case.apply(y, x, rows))
    assert seen == [torch.ops.mstar_lora.apply]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_bucket_holds_every_mix_of_its_rows(invariant: bool) -> None:
    for capacity, slots in ((1, 1), (7, 3), (64, 32), (300, 4), (2048, 64)):
        buffer = TileBuffer(TileSizes.of(capacity, slots, invariant=invariant), CPU)
        mixes = [mixed_slots(capacity, slots, seed) for seed in range(5)]
        mixes += [[1] * capacity, [1 + row % slots for row in range(capacity)]]
        for mix in mixes:
            rows = buffer.fill(rows_by_slot(mix))
            covered = [
                (storage + 1, int(rows.order_R[place]))
                for storage, first, stop in rows.tiles_N3.tolist()
                for place in range(first, stop)
            ]
            assert sorted(covered) == sorted((s, row) for row, s in enumerate(mix) if s)
            tiles = rows.tiles_N3
            assert tiles.storage_offset() % ALIGNED == 0, "kernels are compiled for aligned tables"
            assert int((tiles[:, 2] - tiles[:, 1]).max()) <= rows.block_rows


def test_a_step_that_a_bucket_cannot_hold_is_refused() -> None:
    buffer = TileBuffer(TileSizes.of(4, 2), CPU)
    with pytest.raises(LockstepError, match="5 adapter rows in 1 tiles"):
        buffer.fill({1: [0, 1, 2, 3, 4]})
    with pytest.raises(LockstepError, match="3 adapter rows in 3 tiles"):
        buffer.fill({1: [0], 2: [1], 3: [2]})


def test_launch_sizes_follow_from_shapes_alone() -> None:
    sizes = launch.shrink_sizes(16, launch.DECODE_ROWS, 2)
    tiles = TileSizes.of(64, 32).tiles
    assert (tiles, launch.splits(tiles, 16, 4096, sizes, invariant=False)) == (34, 8)
    assert launch.splits(1, 16, 4096, sizes, invariant=False) == 8, "two steps a split at least"
    assert launch.splits(1000, 16, 4096, sizes, invariant=False) == 1
    assert {launch.splits(n, 16, 4096, sizes, invariant=True) for n in (1, 32, 1000)} == {8}


def test_on_a_machine_without_triton_cuda_pools_take_torch() -> None:
    ops.triton_is_here.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "mstar_tp.kernels.triton.lora.deltas", None)
        assert not ops.triton_is_here()
    ops.triton_is_here.cache_clear()
