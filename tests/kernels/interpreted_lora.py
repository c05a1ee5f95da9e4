"""The LoRA kernels in Triton's interpreter: right for every mix, reading no padding, repeatable.

Triton reads TRITON_INTERPRET as it is imported, so ``test_interpreted.py`` runs this file in a
process of its own. For more examples, by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted_lora.py --hypothesis-profile many
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.delta_cases import (
    DeltaCase,
    DeltaShape,
    mixed_slots,
    rows_by_slot,
    tiled,
)

from mstar_tp.kernels.triton import launch
from mstar_tp.kernels.triton.lora.deltas import launch_shrink
from mstar_tp.lora.device import ops
from mstar_tp.lora.device.tiles import TileBuffer, TileSizes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


MANY = settings().max_examples > 100
NUM_TOKENS = [1, 2, 15, 16, 17, 33, 70] + [513, 4096] * MANY
"""Thousands of tokens take the interpreter seconds: one such step in the suite, more by hand."""


def test_the_interpreter_runs_the_kernels() -> None:
    assert ops.interprets()


@st.composite
def shapes(draw: st.DrawFn) -> DeltaShape:
    max_rank = draw(st.sampled_from([1, 3, 8, 16, 17, 40, 64, 128]))
    slots = draw(st.sampled_from([1, 2, 5, 64]))
    return DeltaShape(
        in_features=draw(st.sampled_from([1, 24, 64, 130, 300])),
        out_sizes=tuple(draw(st.lists(st.sampled_from([1, 16, 40, 130]), min_size=1, max_size=3))),
        max_rank=max_rank,
        ranks=tuple(draw(st.integers(0, max_rank)) for _ in range(slots)),
        dtype=draw(st.sampled_from(DTYPES)),
    )


@given(
    shape=shapes(),
    num_tokens=st.sampled_from(NUM_TOKENS),
    seed=st.integers(0, 1000),
    invariant=st.booleans(),
)
def test_every_mix_of_rows_equals_float64(
    shape: DeltaShape, num_tokens: int, seed: int, invariant: bool
) -> None:
    slots = mixed_slots(num_tokens, len(shape.ranks), seed)
    rows = tiled(slots, CPU, invariant=invariant)
    if rows is not None:
        DeltaCase(shape, CPU, seed).check(slots, rows)


@pytest.mark.parametrize(
    ("num_tokens", "in_features", "dtype", "out_sizes", "ranks"),
    [
        (500, 600, torch.float16, (200,), (128, 5, 0)),
        (40, 600, torch.bfloat16, (130, 20, 20), (33, 1, 64, 7)),
        (4096, 64, torch.float32, (40,), (16, 0, 3)),
    ],
)
def test_large_steps_equal_float64(
    num_tokens: int,
    in_features: int,
    dtype: torch.dtype,
    out_sizes: tuple[int, ...],
    ranks: tuple[int, ...],
) -> None:
    shape = DeltaShape(
        in_features=in_features, out_sizes=out_sizes, max_rank=max(ranks), ranks=ranks, dtype=dtype
    )
    slots = mixed_slots(num_tokens, len(ranks), seed=1)
    rows = tiled(slots, CPU)
    assert rows is not None
    DeltaCase(shape, CPU, 1).check(slots, rows)


@pytest.mark.parametrize("in_features", [64, 1024])  # in one launch, and in two with splits
def test_one_captured_bucket_serves_every_mix(in_features: int) -> None:
    shape = DeltaShape(
        in_features=in_features,
        out_sizes=(40, 16),
        max_rank=24,
        ranks=(24, 3, 0, 9),
        dtype=torch.float16,
    )
    case = DeltaCase(shape, CPU, 3)
    assert launch.is_fused(24, in_features, 2, launch.DECODE_ROWS) == (in_features == 64)
    buffer = TileBuffer(TileSizes.of(24, 4), CPU)
    places = set()
    for slots in ([0] * 8, [1] * 24, [1, 2, 0, 3, 4, 4, 2], [4]):
        rows = buffer.fill(rows_by_slot(slots))
        places.add((rows.order_R.data_ptr(), rows.tiles_N3.data_ptr(), len(rows.tiles_N3)))
        case.check(slots, rows)
    assert len(places) == 1, "a replay reads what was captured"


def test_shrink_computes_each_slots_own_rank_alone() -> None:
    shape = DeltaShape(
        in_features=40, out_sizes=(8, 8), max_rank=16, ranks=(16, 3, 0), dtype=torch.float16
    )
    case = DeltaCase(shape, CPU, 6)
    x, _ = case.rows(5)
    rows = tiled([1, 2, 0, 3, 2], CPU)
    assert rows is not None
    h_PRM = torch.full((2, len(rows.order_R), 32), 7.0)
    launch_shrink(h_PRM, x, case.a, rows.order_R, rows.tiles_N3, case.ranks, 16, rows.block_rows)
    for storage, first, stop in rows.tiles_N3.tolist():
        packed = 2 * shape.ranks[storage]
        assert (h_PRM[:, first:stop, packed:] == 7).all(), "padding was written"
        assert (h_PRM[:, first:stop, :packed] != 7).all()


def test_in_the_invariant_mode_a_rows_bits_do_not_depend_on_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "ENOUGH_BLOCKS", 4)  # else a few rows change no launch
    shape = DeltaShape(
        in_features=2048, out_sizes=(40,), max_rank=16, ranks=(16, 7, 16), dtype=torch.float32
    )
    case = DeltaCase(shape, CPU, 4)
    slots = [1] * 20 + [2, 3, 0, 2]
    x, y = case.rows(len(slots))
    together = tiled(slots, CPU, invariant=True)
    assert together is not None
    whole = case.apply(y, x, together)
    for row in (0, 19, 20, 23):
        alone = tiled([slots[row]], CPU, invariant=True)
        assert alone is not None
        assert torch.equal(case.apply(y[row : row + 1], x[row : row + 1], alone)[0], whole[row])
