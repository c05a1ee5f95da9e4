"""KV pages as a resource of a step: what the leader reserves, what every rank takes at its admit.

A request reserves the pages of all its tokens so far when it is admitted to run, and takes them
chunk by chunk; pages for
tokens it samples later are taken as it grows. When they run out the scheduler preempts the youngest
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.errors import LockstepError


class KvPool:
    """Threads as ``Resource`` states them; the page table's owner is stated in ``pages``.

    ``num_tokens_of`` gives a request's tokens (prompt and output) once every step sent has run.
    """

    def __init__(self, table: PageTable, num_tokens_of: Callable[[int], int]) -> None:
        self.table = table
        self._num_tokens_of = num_tokens_of
        self._reserved: dict[int, int] = {}
        self._fresh: list[tuple[int, int]] = []
        self._growth = 0

    # ------------------------------------------------------------------ main thread, leader only

    @property
    def unreserved(self) -> int:
        """Free pages that no reservation counts on."""
        owed = sum(
            max(0, pages - len(self.table.held(rid))) for rid, pages in self._reserved.items()
        )
        return self.table.num_free - owed

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """Every request wants pages until it has reserved. One always fits alone: start-up refuses
        a
        max_model_len that the pages cannot hold."""
        return None if rid in self._reserved else Ask.ASKS

    def reserve(self, rid: int) -> int | None:
        wanted = self._wanted(rid)
        missing = max(0, wanted - len(self.table.held(rid)))
        if missing > self.unreserved:
            return None
        self._reserved[rid] = wanted
        return missing

    def unreserve(self, rid: int) -> None:
        if self._reserved.pop(rid, None) is not None:
            self._growth += 1

    def try_reserve_growth(self, rid: int, num_tokens: int) -> bool:
        """Let a running row count on pages for ``num_tokens`` tokens; False when none are free."""
        wanted = self.table.pages_for(num_tokens)
        reserved = max(self._reserved.get(rid, 0), len(self.table.held(rid)))
        if wanted > reserved:
            if wanted - reserved > self.unreserved:
                return False
            self._reserved[rid] = wanted
        return True

    def growth_mark(self) -> int:
        return self._growth

    def grew_since(self, mark: int) -> bool:
        return self._growth != mark

    def _wanted(self, rid: int) -> int:
        # One token more than there is: the row that just fits must not be preempted by its first
        # sample.
        return min(self.table.pages_for(self._num_tokens_of(rid) + 1), self.table.num_pages)

    # ------------------------------------------------------------------ main thread, every rank

    def remove_request(self, rid: int) -> None:
        """Give back the request's pages (its removal, or a preemption: it computes them again)."""
        reserved = self._reserved.pop(rid, None)
        if self.table.release(rid) or reserved is not None:
            self._growth += 1

    # ------------------------------------------------------------------ step thread

    def admit(self, step: StepBatch) -> AdmitOutcome:
        self._fresh = []
        for row in step.rows:
            taken = self.table.try_grow(row.rid, row.start + row.num_tokens)
            if taken is None:
                return AdmitOutcome(
                    refused=f"step {step.tp_seq}: request {row.rid} found no free KV page "
                    f"({self.table.num_free} of {self.table.num_pages} free)"
                )
            if taken:
                self._fresh.append((row.rid, taken))
        return AdmitOutcome()

    def rollback_admit(self, step: StepBatch) -> None:
        for rid, count in reversed(self._fresh):
            self.table.shrink(rid, count)
        self._fresh = []

    def commit(self, step: StepBatch) -> None:
        self._fresh = []

    def pages_of(self, rid: int) -> Sequence[int]:
        return self.table.held(rid)

    def post_warmup_validate(self) -> None:
        if self.table.num_used:
            raise LockstepError(f"{self.table.num_used} KV pages are still held after start-up")
