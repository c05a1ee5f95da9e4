"""The contract between a step and what it needs besides weights: KV pages and adapter slots.

A step runs over an ordered tuple of resources, each pool of adapters in graph order and then the
KV pages. The leader asks and reserves, before it sends a step; every rank admits. A step is built
once from the leader's entry, in the same way on every rank, and never changes. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec


class StepRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: ``num_tokens`` tokens from position ``start``.

    ``samples`` is set when the last of them is the request's newest. ``images`` are those of the
    request's images that begin among them: this step encodes them. The head sees the first
    ``scored`` of them, for the prompt's log probabilities, and then the one that samples.
    ``cached`` counts the tokens before ``start`` whose kept pages the row leases with this step.
    """

    rid: int
    start: int
    num_tokens: int
    samples: bool
    images: tuple[int, ...] = ()
    scored: int = 0
    cached: int = 0

    @property
    def num_head_rows(self) -> int:
        """The number of rows of logits that the head computes for it."""
        return self.scored + self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step, in the order the leader gave its rows; decode rows come before prefill chunks."""

    tp_seq: int
    rows: tuple[StepRow, ...]

    def without(self, failed: dict[int, str]) -> StepBatch:
        """The step without the rows of the requests in ``failed``."""
        if not failed:
            return self
        rows = tuple(row for row in self.rows if row.rid not in failed)
        return StepBatch(tp_seq=self.tp_seq, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitOutcome:
    """The decision of one resource's admit, equal on every rank.

    ``failed`` maps the rows that failed on every rank to the cause. ``refused`` says why the whole
    step is refused; ``failed`` then says nothing.
    """

    failed: dict[int, str] = field(default_factory=dict)
    refused: str | None = None


class Ask(Enum):
    """A resource's answer to a waiting row that still wants something of it."""

    ASKS = "asks"
    """The row will need this resource."""
    NOT_IN = "not in"
    """The row's adapter is not on every rank now: it neither runs nor keeps anyone waiting."""


@dataclass(frozen=True, slots=True)
class AskFailed:
    """A resource's answer to a row that can never have what it needs, with the cause."""

    cause: str


class Resource(Protocol):
    """Something that a step needs for its rows.

    The leader's main thread calls ``ask`` to ``grew_since``; every rank's step thread calls
    ``admit``, ``rollback_admit`` and ``commit``, one step after another.
    """

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """Say whether the row still wants something; None when it wants or needs nothing more.

        Pure. A row that holds or has reserved what it needs wants nothing more.
        """
        ...

    def reserve(self, rid: int) -> int | None:
        """Count what the row will need: how many units more, or None when they do not fit now.

        None changes nothing. A reservation pins nothing.
        """
        ...

    def unreserve(self, rid: int) -> None:
        """Forget the row's reservation; a no-op without one."""
        ...

    def growth_mark(self) -> int:
        """The mark that ``grew_since`` compares with."""
        ...

    def grew_since(self, mark: int) -> bool:
        """Return whether a waiting head should be retried.

        It should when something was freed, the last copy came in, a read failed or an adapter was
        evicted; not when a reservation became a lease.
        """
        ...

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Take for real what the step's rows need. May be a collective on the block's CPU twin."""
        ...

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back exactly what this admit freshly took, also after a refusal of its own."""
        ...

    def commit(self, step: StepBatch) -> None:
        """The step ran, or was rolled back: what its admit took is no longer fresh."""
        ...

    def post_warmup_validate(self) -> None:
        """Check that the tables are as after start. Main thread, before the rank serves.

        Raises:
            LockstepError: something is still held.
        """
        ...


class Admitted(NamedTuple):
    """The rows that run, those that failed on every rank and why, or why the step is refused."""

    step: StepBatch
    failed: dict[int, str]
    refused: str | None


def admit_in_turn(resources: Sequence[Resource], step: StepBatch) -> Admitted:
    """Admit a step to each resource in turn: it gets all that its rows need, or nothing.

    A row that failed in one resource asks for nothing of the next. When one refuses, every resource
    that was reached, the refuser included, rolls back, the last first; rows that resources before
    the refuser failed stay failed. Step thread. Collective where a resource's admit is.
    """
    reached: list[tuple[Resource, StepBatch]] = []
    failed: dict[int, str] = {}
    for resource in resources:
        reached.append((resource, step))
        outcome = resource.admit(step)
        if outcome.refused is not None:
            for each, asked in reversed(reached):
                each.rollback_admit(asked)
            return Admitted(step, failed, outcome.refused)
        failed |= outcome.failed
        step = step.without(outcome.failed)
    return Admitted(step, failed, None)
