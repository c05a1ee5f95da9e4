"""What a step needs besides weights: KV pages and adapter slots, behind one interface.

A step is frozen: it is built once from the leader's entry, in the same way on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One request's share of a step: ``num_tokens`` tokens from position ``start``.

    ``samples`` when the last of them is the request's newest.
    """

    rid: int
    start: int
    num_tokens: int
    samples: bool


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
    """Answer of ``Resource.ask``: the row will need this resource."""

    ASKS = "asks"


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
        """Whether the row still wants something: None, ASKS, or why it fails. Pure.

        Main, leader only.
        """
        ...

    def try_reserve(self, rid: int) -> bool:
        """Count what the row will need; False when it does not fit now (nothing was counted).

        Main, leader only.
        """
        ...

    def unreserve(self, rid: int) -> None:
        """Forget a reservation; a no-op without one. Main, leader only."""
        ...

    def growth_mark(self) -> int:
        """A counter that moves when a waiting head should be retried. Main, leader only."""
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
