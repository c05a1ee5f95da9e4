"""The kernels of routed experts in Triton's interpreter. See ``interpreted_lora.py`` for how this
runs.
"""

from __future__ import annotations

import pytest
import torch

from mstar_tp.testing.expert_cases import check_experts


@pytest.mark.parametrize(
    ("dtype", "tokens", "experts", "choices", "only", "ranks"),
    [
        (torch.bfloat16, 9, 5, 2, None, (5, 0, 8)),
        (torch.float32, 150, 3, 2, 2, (17,)),  # large tiles, and an expert without tokens
    ],
    ids=str,
)
def test_every_mix_of_tokens_equals_float64(
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    choices: int,
    only: int | None,
    ranks: tuple[int, ...],
) -> None:
    check_experts(
        torch.device("cpu"),
        dtype,
        tokens=tokens,
        experts=experts,
        choices=choices,
        ranks=ranks,
        only=only,
        seed=3,
    )
