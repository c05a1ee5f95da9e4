"""Which graph a step replays follows from its shape alone: the least that holds it, with deltas
just when a row has an adapter, filled up to its size.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.engine.graphs.buckets import GraphKey, GraphSizes, Kind, StepShape, Variant

COUNTS = st.lists(st.integers(1, 80), max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    COUNTS,
    COUNTS,
    st.integers(1, 64),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from([*Variant, None]),
    st.booleans(),
)
def test_a_step_takes_the_least_graph_of_its_kind_that_holds_it(
    rows: list[int],
    tokens: list[int],
    max_num_seqs: int,
    num_tokens: int,
    decodes: bool,
    variant: Variant | None,
    eager: bool,
) -> None:
    sizes = GraphSizes.of(max_num_seqs, 64, rows, tokens)
    choice = sizes.choose(StepShape(num_tokens, decodes, variant, eager))
    fits = {
        Kind.DECODE: [size for size in sizes.rows if size >= num_tokens and decodes],
        Kind.PIECES: [size for size in sizes.tokens if size >= num_tokens],
    }
    if variant is None or eager or not num_tokens or not any(fits.values()):
        assert choice is None
        return
    assert choice is not None
    kind = Kind.DECODE if fits[Kind.DECODE] else Kind.PIECES
    assert choice.key == GraphKey(kind, min(fits[kind]), variant)
    assert choice.key in sizes.keys(with_deltas=True)
    assert choice.padding == choice.key.size - num_tokens >= 0


def test_sizes_are_powers_of_two_and_the_largest_step_unless_they_are_given() -> None:
    assert GraphSizes.of(6, 128) == GraphSizes((1, 2, 4, 6), (16, 32, 64, 128))
    assert GraphSizes.of(64, 2048).rows == (1, 2, 4, 8, 16, 32, 64)
    assert GraphSizes.of(64, 2048).tokens[-1] == 512
    assert GraphSizes.of(64, 2048, [], []) == GraphSizes((), ())
    # Of those past the largest step only the least is of use.
    assert GraphSizes.of(6, 20, [4, 16, 8], [64, 32, 8]) == GraphSizes((4, 8), (8, 32))


def test_every_size_is_captured_twice_where_adapters_are_served_and_the_largest_first() -> None:
    sizes = GraphSizes((1, 4), (16,))
    assert [(k.kind, k.size) for k in sizes.keys(with_deltas=False)] == [
        (Kind.PIECES, 16),
        (Kind.DECODE, 4),
        (Kind.DECODE, 1),
    ]
    twice = sizes.keys(with_deltas=True)
    assert [k.variant for k in twice] == [Variant.DELTAS, Variant.BASE] * 3
    assert len(set(twice)) == 6
