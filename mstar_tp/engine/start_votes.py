"""Votes of all ranks at start: whether everybody succeeded, and whether all have the same values.

A rank that cannot start votes so, and never leaves the others inside a collective. Main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mstar_tp.common.errors import LockstepError, MstarError
from mstar_tp.distributed.comm import JointGroups

T = TypeVar("T")


class OtherRankFailedError(MstarError):
    """Another rank could not start; it says why itself."""


def voted(groups: JointGroups, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and go on only when all succeeded. Collective on the block.

    Raises:
        BaseException: what this rank's own work raised.
        OtherRankFailedError: this rank succeeded and another did not.
    """
    error: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as failure:
        error = failure
    (everyone,) = groups.agree([0 if error is not None else 1])
    if error is not None:
        raise error
    if not everyone:
        raise OtherRankFailedError("another rank could not start")
    return value  # type: ignore[return-value]  # T may include None


def check_equal(groups: JointGroups, values: dict[str, int]) -> None:
    """Check that every rank has the same number under each name. Collective on the block.

    Raises:
        LockstepError: naming a value that differs on another rank.
    """
    for name, same in zip(values, groups.same(list(values.values())), strict=True):
        if not same:
            raise LockstepError(
                f"rank {groups.tp.rank}: {name} is {values[name]} here and differs on another rank"
            )
