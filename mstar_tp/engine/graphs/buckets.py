"""The choice of the captured graph that a step replays, and of its padding. No torch.

Plain data, the same on every rank: all of it follows from the configuration and the step's rows.

A *decode* graph is a whole forward with its logits, for steps whose rows all have one token and
sample. *Pieces* are a forward cut at its attentions, for any other step. Each is captured for a few
sizes, and a step takes the least that holds it: what is left over is *padding*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

FIRST_PIECES = 16
LAST_PIECES = 512
"""The tokens of the largest pieces by default.

Beyond, a layer computes for longer than its launches take.
"""


class Variant(Enum):
    """The kind of a graph: with delta kernels, or base-only for steps without adapter rows."""

    BASE = "base-only"
    DELTAS = "with deltas"


class Kind(Enum):
    DECODE = "decode"
    PIECES = "pieces"


class GraphKey(NamedTuple):
    """One captured graph. ``size``: rows of a decode graph, tokens of pieces."""

    kind: Kind
    size: int
    variant: Variant

    def __str__(self) -> str:
        unit = "rows" if self.kind is Kind.DECODE else "tokens"
        return f"{self.kind.value} of {self.size} {unit} {self.variant.value}"


class StepShape(NamedTuple):
    """The facts of a step that a choice depends on.

    ``decodes``: every row has one token and samples. ``variant``: None where the step's adapters
    change something that no graph launches; ``eager``: the step has rows that only an eager forward
    runs (images).
    """

    num_tokens: int
    decodes: bool
    variant: Variant | None
    eager: bool = False


class Choice(NamedTuple):
    key: GraphKey
    padding: int
    """Rows, or tokens, that the graph runs besides the step's."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes that are captured, in rising order: ``rows`` of decode graphs, ``tokens`` of pieces."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        rows: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> GraphSizes:
        """Return the configured sizes, without those that no step needs.

        By default they are powers of two, and the largest step's rows.
        """
        if rows is None:
            rows = [*_powers(1, max_num_seqs), max_num_seqs]
        if tokens is None:
            tokens = _powers(FIRST_PIECES, min(LAST_PIECES, max_num_batched_tokens) + 1)
        return cls(_useful(rows, max_num_seqs), _useful(tokens, max_num_batched_tokens))

    def choose(self, shape: StepShape) -> Choice | None:
        """The graph that a step replays; None: it runs eagerly."""
        if shape.variant is None or shape.eager or shape.num_tokens == 0:
            return None
        kinds = (Kind.DECODE, Kind.PIECES) if shape.decodes else (Kind.PIECES,)
        for kind in kinds:
            sizes = self.rows if kind is Kind.DECODE else self.tokens
            size = next((size for size in sizes if size >= shape.num_tokens), None)
            if size is not None:
                key = GraphKey(kind, size, shape.variant)
                return Choice(key, size - shape.num_tokens)
        return None

    def keys(self, with_deltas: bool) -> tuple[GraphKey, ...]:
        """Every graph, the largest first: the smaller ones fit in the memory that it took."""
        variants = (Variant.DELTAS, Variant.BASE) if with_deltas else (Variant.BASE,)
        pairs = [(Kind.PIECES, size) for size in reversed(self.tokens)]
        pairs += [(Kind.DECODE, size) for size in reversed(self.rows)]
        return tuple(GraphKey(*pair, variant) for pair in pairs for variant in variants)


def _powers(first: int, stop: int) -> list[int]:
    """first, 2 first, 4 first … below ``stop``."""
    return list(takewhile(lambda size: size < stop, (first << n for n in range(64))))


def _useful(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Up to the least that holds ``most``."""
    ordered = sorted(set(sizes))
    enough = sum(size < most for size in ordered) + 1
    return tuple(ordered[:enough])
