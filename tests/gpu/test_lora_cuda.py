"""The LoRA kernels on a CUDA device: right for every mix, repeatable, captured and replayed."""

from __future__ import annotations

import pytest
import torch

from mstar_tp.lora.tiles import TileBuffer, TileSizes
from mstar_tp.testing.delta_cases import DeltaCase, DeltaShape, mixed_slots, rows_by_slot, tiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("max_rank", [1, 3, 16, 40, 64, 128])
def test_every_mix_of_rows_equals_float64(
    max_rank: int, invariant: bool, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    for seed, (num_tokens, slots) in enumerate([(1, 1), (17, 4), (64, 32), (256, 64), (4096, 7)]):
        ranks = tuple(slot * 7 % (max_rank + 1) for slot in range(1, slots + 1))
        for in_features, out_sizes in ((130, (40, 1)), (4096, (4096, 1024, 1024))):
            shape = DeltaShape(
                in_features=in_features,
                out_sizes=out_sizes,
                max_rank=max_rank,
                ranks=ranks,
                dtype=dtype,
            )
            mix = mixed_slots(num_tokens, slots, seed)
            rows = tiled(mix, device, invariant=invariant)
            if rows is not None and num_tokens * in_features <= 1 << 20:
                DeltaCase(shape, device, seed).check(mix, rows)


@pytest.mark.parametrize("in_features", [64, 4096])  # in one launch, and in two with splits
def test_a_captured_graph_replays_every_mix(in_features: int) -> None:
    device = torch.device("cuda")
    shape = DeltaShape(
        in_features=in_features,
        out_sizes=(256, 64),
        max_rank=16,
        ranks=(16, 3, 0, 9),
        dtype=torch.bfloat16,
    )
    case = DeltaCase(shape, device, 5)
    buffer = TileBuffer(TileSizes.of(32, 4), device)
    x, y = case.rows(32)
    case.apply(y, x, buffer.fill({1: list(range(32))}))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rows = buffer.fill({})
    with torch.cuda.graph(graph):
        out = case.apply(y, x, rows)
    for seed in range(6):
        x_new, y_new = case.rows(32)
        x.copy_(x_new)
        y.copy_(y_new)
        rows = buffer.fill(rows_by_slot(mixed_slots(32, 4, seed)))
        graph.replay()
        assert torch.equal(out, case.apply(y, x, rows))
