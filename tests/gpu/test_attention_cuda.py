"""The attention kernels on a CUDA device: right for every mix of rows, repeatable, captured and
replayed, and alike in any company where that is asked for.
"""

from __future__ import annotations

import random

import pytest
import torch

from mstar_tp.layers.attention import AttentionShape
from mstar_tp.testing.attention_cases import AttentionCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case_of(shape: AttentionShape, dtype: torch.dtype, seed: int = 0) -> AttentionCase:
    return AttentionCase(shape=shape, dtype=dtype, device=CUDA, num_pages=400, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 4), (1, 7), (8, 1), (1, 24)])
def test_every_mix_of_rows_equals_float64(
    kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    chooser = random.Random(f"{kv_heads} {group} {dim}")
    for window, softcap in ((None, None), (150, None), (None, 30.0), (33, 5.0)):
        shape = AttentionShape(kv_heads * group, kv_heads, dim, dim**-0.5, window, softcap)
        spans = [
            (chooser.choice([0, 1, 100, 700, 1500]), chooser.choice([1, 1, 1, 2, 65, 200]))
            for _ in range(3)
        ]
        for invariant in (False, True):
            case = case_of(shape, dtype, seed=chooser.randrange(1000))
            rows = case.rows(spans)
            case.step(rows).check(case.planner(invariant=invariant).plan(rows))


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_graph_replays_every_mix(dim: int, decodes: bool) -> None:
    case = case_of(AttentionShape(8, 2, dim, dim**-0.5, window=600), torch.bfloat16)
    planner = case.planner()
    tokens = 16 if decodes else 256
    buffer = planner.decode_buffer(16, 60) if decodes else planner.mixed_buffer(16, tokens, 60)
    mixes = (
        ((0, 1),),
        tuple((40 * row, 1) for row in range(16)),
        ((900, 1), (3, 1), (64, 1)),
        ((500, 1), (70, 100), (0, 130)),
    )
    step = case.step((), num_tokens=tokens)
    step.attend(buffer.fill(()))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attend(buffer.plan)
    for spans in mixes[: 3 if decodes else 4]:
        rows = case.rows(spans)
        other = case.step(rows, num_tokens=tokens)
        wanted = other.check(buffer.fill(rows))
        for ours, theirs in zip(
            (step.q, step.k, step.v, step.cache),
            (other.q, other.k, other.v, other.cache),
            strict=True,
        ):
            ours.copy_(theirs)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_the_invariant_mode_a_rows_bits_do_not_depend_on_its_company(
    dtype: torch.dtype,
) -> None:
    case = case_of(AttentionShape(8, 2, 128, 0.1), dtype)
    rows = case.rows([(2000, 1), (20, 1), (300, 90), (1500, 1)])
    step, planner = case.step(rows), case.planner(invariant=True)
    whole = step.attend(planner.plan(rows))
    first = 0
    for row in rows:
        stop = first + row.num_tokens
        part = case.step([row])
        part.cache = step.cache
        part.q, part.k, part.v = (x[first:stop] for x in (step.q, step.k, step.v))
        assert torch.equal(part.attend(planner.plan([row])), whole[first:stop])
        first = stop
