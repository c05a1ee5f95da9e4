"""The one vote of an admit with misses, and what its minimum over the ranks says (R6).

Plain integers, no torch. A vote's length is the same on every rank: it depends on the pool's slots
and the step's misses only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from mstar_tp.common.errors import LockstepError
from mstar_tp.wire.values import AdapterKey

_UNKNOWN = (1 << 63) - 1
"""Neutral under MIN: a rank without a digest says nothing about it."""


_RANKS = 1 << 20
"""More than there are ranks: a failure votes its rank's number, every other state more than any."""


class CopyState(IntEnum):
    """The state of an adapter's copy, ordered so that the ranks' minimum is the group's."""

    FAILED = 0
    WAITING = 1
    IN = 2


@dataclass(frozen=True, slots=True)
class Miss:
    """This rank's view of one adapter that a step needs and no slot holds."""

    key: AdapterKey
    state: CopyState
    digest: str | None


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The group's view of one miss.

    ``same`` is False when two ranks read different weights; ``failed_rank`` is the first rank whose
    read failed, where one did.
    """

    state: CopyState
    same: bool
    failed_rank: int | None = None

    @property
    def survives(self) -> bool:
        return self.same and self.state is not CopyState.FAILED


HEAD = 4
"""The number of a vote's numbers that say which step and which adapters it is about."""


def cast(tp_seq: int, misses: Sequence[Miss], width: int, rank: int, stage: int = 0) -> list[int]:
    """This rank's vote on the adapters that the slots of stage ``stage`` lack.

    ``width`` misses have a place in it even when there are fewer.
    """
    keys = _number("\n".join((str(stage), *(str(miss.key) for miss in misses))))
    vote = [tp_seq, -tp_seq, keys, -keys]
    for miss in misses:
        digest = None if miss.digest is None else _number(miss.digest)
        pair = (_UNKNOWN, _UNKNOWN) if digest is None else (digest, -digest)
        state = rank if miss.state is CopyState.FAILED else _RANKS + miss.state
        vote += (state, *pair)
    return vote + [_UNKNOWN] * (3 * max(0, width - len(misses)))


def count(
    tp_seq: int, misses: Sequence[Miss], agreed: Sequence[int], rank: int
) -> list[VoteResult]:
    """Count the votes: the result of each miss, from the minimum of all ranks' votes.

    Raises:
        LockstepError: the ranks are in the admits of different steps, or miss different adapters.
    """
    low, high = agreed[0], -agreed[1]
    if low != high:
        raise LockstepError(
            f"rank {rank}: in the admit of step {tp_seq} the ranks are at steps {low} to {high}"
        )
    if agreed[2] != -agreed[3]:
        raise LockstepError(
            f"rank {rank}: in the admit of step {tp_seq} the ranks miss different adapters; here "
            f"{', '.join(str(miss.key) for miss in misses)}"
        )
    results = []
    for index in range(len(misses)):
        state, low, negated = agreed[4 + 3 * index : 7 + 3 * index]
        same = low == -negated or (low == _UNKNOWN and negated == _UNKNOWN)
        if state < _RANKS:
            results.append(VoteResult(CopyState.FAILED, same, failed_rank=state))
        else:
            results.append(VoteResult(CopyState(state - _RANKS), same))
    return results


def _number(text: str) -> int:
    """A stable 62-bit number for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
