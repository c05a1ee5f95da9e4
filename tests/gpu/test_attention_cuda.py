"""The attention kernels on a CUDA device: right for every mix of rows, repeatable, captured and
replayed, and alike in any company where that is asked for. ``test_checks.py`` runs a few of these.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.attention_cases import (
    KINDS,
    AttentionCase,
    AttentionKind,
    check_company,
    check_replays,
    check_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_every_mix_of_rows_equals_float64(
    kind: AttentionKind, dim: int, dtype: torch.dtype
) -> None:
    chooser = random.Random(f"{kind} {dim}")
    for _ in range(2):
        spans = [
            (chooser.choice([0, 1, 100, 700, 1500]), chooser.choice([1, 1, 1, 2, 65, 200]))
            for _ in range(3)
        ]
        seed = chooser.randrange(1000)
        check_rows(AttentionCase.of(kind._replace(head_dim=dim), dtype, CUDA, seed=seed), spans, 5)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_graph_replays_every_mix(dim: int, decodes: bool) -> None:
    kind = AttentionKind(2, 4, dim, window=600)
    check_replays(AttentionCase.of(kind, torch.bfloat16, CUDA), decodes=decodes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_invariant_mode_a_rows_bits_do_not_depend_on_its_company(
    kind: AttentionKind, dtype: torch.dtype
) -> None:
    spans = [(2000, 1), (20, 1), (300, 90), (1500, 1)]
    check_company(AttentionCase.of(kind, dtype, CUDA), spans)
