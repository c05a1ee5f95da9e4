"""The order stream, leader -> followers: what every rank applies and runs, in this order."""

from __future__ import annotations

import msgspec

from mstar_tp.wire.values import AdapterKey, Message


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's running hashes, one a table (R8); ``engine.checks`` says as of which point."""

    slots: int
    pages: int
    cpu_cache: int
    served: int
    tokens: int


class Step(Message, frozen=True, kw_only=True):
    """Run step ``tp_seq`` over ``rows`` of (rid, number of tokens), in this order.

    ``planned_after``: the last step whose outcome the leader knew when it planned this one (-1:
    none). Should a later one turn out refused, this step is void if it shares a row with it (R5).
    ``cached``: (rid, number of tokens) of rows that begin behind what pages hold already, which the
    row leases in this step's admit, on every rank the same.
    """

    ingested: int
    tp_seq: int
    planned_after: int
    rows: tuple[tuple[int, int], ...]
    checks: Checks
    cached: tuple[tuple[int, int], ...] = ()


class Remove(Message, frozen=True, kw_only=True):
    """Close ``rid``, between the admit of ``after_tp_seq`` (-1: none yet) and the next one (R3)."""

    ingested: int
    after_tp_seq: int
    rid: int


class Preempt(Message, frozen=True, kw_only=True):
    """Give back ``rid``'s pages.

    What they hold moves to host memory if ``offload``, until a step names the request again; else
    it is computed again then. Its adapter slot stays held.
    """

    ingested: int
    after_tp_seq: int
    rid: int
    offload: bool = False


class DropCopy(Message, frozen=True, kw_only=True):
    """The order to drop a copy that rank ``rank`` could not read.

    Every rank drops the copy of fetch ``fetch_no``, and the requests that wait on it end with
    ``cause`` (R7).
    """

    ingested: int
    after_tp_seq: int
    key: AdapterKey
    fetch_no: int
    rank: int
    cause: str
    stage: int = 0
    """The stage of the model: each has a CPU cache of its own."""


class Forget(Message, frozen=True, kw_only=True):
    """Forget the slots of adapters that were unloaded and that no live request names."""

    ingested: int
    after_tp_seq: int


class Advance(Message, frozen=True, kw_only=True):
    """Apply conductor messages up to ``ingested``; nothing else follows at once.

    ``last``: a Shutdown is among them, and the leader leaves once its steps have ended.
    """

    ingested: int
    last: bool = False


ScheduleEntry = Step | Remove | Preempt | DropCopy | Forget | Advance
