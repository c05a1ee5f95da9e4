"""What a step needs besides weights: KV pages and adapter slots, behind one interface.

A step is frozen: it is built once from the leader's entry, in the same way on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec


class StepRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: ``num_tokens`` tokens from position ``start``.

    ``samples`` when the last of them is the request's newest. ``images`` are those of the request's
    images that begin among them: this step encodes them. The head sees the first ``scored`` of
    them, for the prompt's log probabilities, and then the one that samples. ``cached``: the tokens
    before ``start``, when pages that are kept hold them, which the row leases with this step.
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
        return self.scored + self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step, in the order the leader gave its rows. Decode rows come before prefill chunks."""

    tp_seq: int
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitOutcome:
    """What an admit decided.

    Rows that failed on every rank alike (rid -> cause), or why the whole step is refused.
    """

    failed: dict[int, str] = field(default_factory=dict)
    refused: str | None = None


class Ask(Enum):
    """Answer of ``Resource.ask``.

    ASKS: the row will need this resource. NOT_IN: what the row runs with is not on every rank now,
    so it is not in the queue: it neither runs nor keeps anyone waiting.
    """

    ASKS = "asks"
    NOT_IN = "not in"


@dataclass(frozen=True, slots=True)
class AskFailed:
    """Answer of ``Resource.ask``: the row can never have what it needs, and why."""

    cause: str


class Resource(Protocol):
    """Something a step needs for its rows. "Main" in a method is the rank's main thread."""

    def remove_request(self, rid: int) -> None:
        """Close the request's state; a rid that is unknown is a no-op. Main."""
        ...

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """Whether the row still wants something: None (it wants nothing, holds or has reserved
        already), ASKS, NOT_IN, or why it fails. Pure.

        Main, leader only.
        """
        ...

    def reserve(self, rid: int) -> int | None:
        """Count what the row will need; how many units more are now spoken for, or None when they
        do not fit now (nothing was counted). Pins nothing.

        Main, leader only.
        """
        ...

    def unreserve(self, rid: int) -> None:
        """Forget a reservation; a no-op without one. Main, leader only."""
        ...

    def growth_mark(self) -> int:
        """What ``grew_since`` compares with. Main, leader only."""
        ...

    def grew_since(self, mark: int) -> bool:
        """Whether a waiting head should be retried: something was freed, the last copy came in, a
        read failed, an eviction happened; not when a reservation becomes a hold.

        Main, leader only.
        """
        ...

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Take for real what the step's rows need.

        Step thread. May be a collective on the block's CPU twin.
        """
        ...

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back what this admit freshly took. Step thread."""
        ...

    def commit(self, step: StepBatch) -> None:
        """The step ran: record consumption, clear its plan. Step thread."""
        ...

    def post_warmup_validate(self) -> None:
        """Raise LockstepError unless the tables are as after start. Main, before serving."""
        ...
