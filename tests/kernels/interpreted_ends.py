"""The kernels beside the linears in Triton's interpreter: both ends of a model, biases, norms.

See ``interpreted_lora.py`` for how this runs.
"""

from __future__ import annotations

import pytest
import torch

from mstar_tp.testing.delta_cases import mixed_slots, tiled
from mstar_tp.testing.end_cases import EndCase

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "ranks", "saved"),
    [
        (torch.float32, 21, (24, 3, 0, 17, 5), (0, 7, 1, 50, 0)),
        (torch.bfloat16, 70, (1, 0), (2, 3)),
        (torch.float16, 7, (24,), (0,)),
    ],
    ids=str,
)
def test_every_mix_of_rows_equals_float64(
    dtype: torch.dtype, num_tokens: int, ranks: tuple[int, ...], saved: tuple[int, ...]
) -> None:
    slots = mixed_slots(num_tokens, len(ranks), seed=5)
    rows = tiled(slots, CPU)
    assert rows is not None
    EndCase(CPU, dtype, seed=1, ranks=ranks, saved=saved).check(slots, rows)
