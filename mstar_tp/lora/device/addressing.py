"""The slots that a step's rows address: plain data, made by the step thread. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The requests of a step's tokens: (request, number of tokens) in the step's order."""

    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoraAddressing:
    """A step's tokens grouped by slot.

    ``token_order[slot_indptr[s]:slot_indptr[s + 1]]`` are the tokens that address slot s, for s of
    0..num_slots; those of slot 0 (base rows) are left out, so its range is empty.
    """

    token_order: tuple[int, ...]
    slot_indptr: tuple[int, ...]

    @classmethod
    def of(cls, slots: Sequence[int], counts: Sequence[int], num_slots: int) -> LoraAddressing:
        """Build the addressing from each row's slot and number of tokens."""
        tokens: list[list[int]] = [[] for _ in range(num_slots + 1)]
        first = 0
        for slot, num_tokens in zip(slots, counts, strict=True):
            if slot:
                tokens[slot] += range(first, first + num_tokens)
            first += num_tokens
        order: list[int] = []
        indptr = [0]
        for group in tokens:
            order += group
            indptr.append(len(order))
        return cls(tuple(order), tuple(indptr))
