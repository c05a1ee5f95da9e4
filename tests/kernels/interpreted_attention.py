"""The attention kernels in Triton's interpreter: right for every mix of rows, reading nothing that
no query sees, repeatable, and never sized by a step's rows.

Triton reads TRITON_INTERPRET as it is imported, so ``test_interpreted.py`` runs this file in a
process of its own. For more examples, by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted_attention.py --hypothesis-profile many
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import AttentionCase, check_company

from mstar_tp.layers.attention.attention import AttentionShape
from mstar_tp.lora.device.ops import interprets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_the_interpreter_runs_the_kernels() -> None:
    assert interprets()


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    kv_heads, group = draw(
        st.sampled_from([(1, 1), (1, 3), (1, 8), (1, 20), (2, 2), (3, 1), (2, 7)])
    )
    dim = draw(st.sampled_from([8, 16, 64, 80, 96, 256]))
    shape = AttentionShape(
        kv_heads * group,
        kv_heads,
        dim,
        dim**-0.5,
        draw(st.sampled_from([None, None, 1, 33, 150])),
        draw(st.sampled_from([None, None, 4.0, 50.0])),
    )
    page_size = draw(st.sampled_from([1, 16, 24]))
    return AttentionCase(
        shape=shape,
        dtype=draw(st.sampled_from(DTYPES)),
        device=CPU,
        page_size=page_size,
        num_pages=1600 // page_size,
        seed=draw(st.integers(0, 1000)),
    )


spans = st.tuples(
    st.sampled_from([0, 0, 1, 15, 128, 190, 300]), st.sampled_from([1, 1, 1, 2, 17, 70])
)


@given(case=cases(), rows=st.lists(spans, min_size=1, max_size=4), invariant=st.booleans())
def test_every_mix_of_rows_equals_float64(
    case: AttentionCase, rows: list[tuple[int, int]], invariant: bool
) -> None:
    dealt = case.rows(rows)
    case.step(dealt).check(case.planner(invariant=invariant).plan(dealt))


def test_one_captured_bucket_serves_every_mix_of_decodes() -> None:
    shape = AttentionShape(6, 2, 24, 0.2, window=200)
    case = AttentionCase(shape=shape, dtype=torch.float32, device=CPU)
    buffer = case.planner().decode_buffer(4, 24)
    places = {tensor.data_ptr() for tensor in (buffer.plan.pages_BW, buffer.plan.lengths_B)}
    for spans in ((), ((0, 1),), ((300, 1), (9, 1), (0, 1), (140, 1)), ((380, 1), (16, 1))):
        rows = case.rows(spans)
        plan = buffer.fill(rows)
        case.step(rows, num_tokens=4).check(plan)
        assert {tensor.data_ptr() for tensor in (plan.pages_BW, plan.lengths_B)} == places


def test_one_captured_bucket_serves_every_mix_of_chunks() -> None:
    shape = AttentionShape(4, 1, 32, 0.2)
    case = AttentionCase(shape=shape, dtype=torch.bfloat16, device=CPU)
    buffer = case.planner().mixed_buffer(4, 96, 12)
    for spans in (((0, 90),), ((3, 1), (100, 40), (0, 2), (20, 30)), ((7, 1),)):
        rows = case.rows(spans)
        case.step(rows, num_tokens=96).check(buffer.fill(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_the_invariant_mode_a_rows_bits_do_not_depend_on_its_company(
    dtype: torch.dtype,
) -> None:
    case = AttentionCase(
        shape=AttentionShape(2, 1, 16, 0.3), dtype=dtype, device=CPU, num_pages=100
    )
    check_company(case, [(700, 1), (20, 1), (40, 9), (500, 1)])


def test_a_prompts_bits_do_not_depend_on_its_chunks() -> None:
    case = AttentionCase(shape=AttentionShape(4, 2, 16, 0.3), dtype=torch.float32, device=CPU)
    (row,) = case.rows([(0, 190)])
    planner, step = case.planner(), case.step([row])
    whole = step.attend(planner.plan([row]))
    for first, stop in ((60, 190), (100, 103), (188, 190)):
        chunk = row._replace(context=first, num_tokens=stop - first)
        part = case.step([chunk])
        part.cache, part.q, part.k, part.v = (
            step.cache,
            *(x[first:stop] for x in (step.q, step.k, step.v)),
        )
        assert torch.equal(part.attend(planner.plan([chunk])), whole[first:stop])
