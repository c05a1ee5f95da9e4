"""KV pages as a resource of a step: what the leader reserves, what every rank takes at its admit.

A request reserves the pages of all its tokens so far when it is admitted to run, and takes them
chunk by chunk; pages for
tokens it samples later are taken as it grows. When they run out the scheduler preempts the youngest
row, whose KV moves to host memory where it has room, and comes back with the step that runs the
row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload, NoCopies
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.errors import LockstepError


class KvPool:
    """Threads as ``Resource`` states them; the page table's owner is stated in ``pages``.

    ``num_tokens_of`` gives a request's tokens (prompt and output) once every step sent has run.
    """

    def __init__(
        self,
        table: PageTable,
        num_tokens_of: Callable[[int], int],
        offload: KvOffload | None = None,
    ) -> None:
        """``offload``: None where the KV of a preempted request is given up."""
        self.table = table
        self.kept = KvOffload(HostPages(0), NoCopies()) if offload is None else offload
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

    def can_offload(self, rid: int, num_tokens: int) -> bool:
        """Whether host memory has room for the KV of the request's first ``num_tokens`` tokens, all
        that it has; pure.
        """
        count = self.reclaimable(num_tokens)
        return self.is_offloaded(rid) or (count > 0 and self.kept.host.fits(count))

    # ------------------------------------------------------------------ main thread, every rank

    @property
    def supports_eviction(self) -> bool:
        """Whether any request's KV may move to host memory."""
        return self.kept.host.num_pages > 0

    def reclaimable(self, num_tokens: int) -> int:
        """Pages whose contents an offload keeps, of a request with KV of so many tokens."""
        return self.table.pages_for(num_tokens) if self.supports_eviction else 0

    def is_offloaded(self, rid: int) -> bool:
        """Whether the request's KV lies in host memory: its next step brings it back."""
        return rid in self.kept.host

    def preempt(self, rid: int, num_tokens: int, *, offload: bool) -> None:
        """Take the pages of a request with KV of ``num_tokens`` tokens, which host memory keeps if
        ``offload``; else they are computed again.

        Raises:
            LockstepError: the leader says that they fit there, and they do not.
        """
        if not offload:
            self.kept.recomputed_tokens += num_tokens
            self.remove_request(rid)
            return
        if not self.can_offload(rid, num_tokens):
            raise LockstepError(
                f"request {rid}: its KV of {num_tokens} tokens was to move to host memory, where "
                f"{self.kept.host.num_used} of {self.kept.host.num_pages} pages are used"
            )
        if not self.is_offloaded(rid):
            self.kept.offload(rid, self.table.held(rid)[: self.reclaimable(num_tokens)])
        self._give_back(rid)

    def remove_request(self, rid: int) -> None:
        """Give back the request's pages, here and in host memory."""
        self.kept.forget(rid)
        self._give_back(rid)

    def _give_back(self, rid: int) -> None:
        reserved = self._reserved.pop(rid, None)
        if self.table.release(rid) or reserved is not None:
            self._growth += 1

    # ------------------------------------------------------------------ step thread

    def admit(self, step: StepBatch) -> AdmitOutcome:
        self._fresh = []
        self.kept.copy_out()
        for row in step.rows:
            taken = self.table.try_grow(row.rid, row.start + row.num_tokens)
            if taken is None:
                return AdmitOutcome(
                    refused=f"step {step.tp_seq}: request {row.rid} found no free KV page "
                    f"({self.table.num_free} of {self.table.num_pages} free)"
                )
            if taken:
                self._fresh.append((row.rid, taken))
        # Nothing can refuse the step any more.
        self.reload([row.rid for row in step.rows if self.is_offloaded(row.rid)])
        return AdmitOutcome()

    def reload(self, rids: Sequence[int]) -> None:
        """Bring back the KV of offloaded requests that hold pages again."""
        if rids:
            self.kept.reload([(rid, self.table.held(rid)) for rid in rids])

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

    def trail(self) -> int:
        """Running hash of every change of pages here and in host memory, for R8."""
        if not self.supports_eviction:
            return self.table.trail()
        # Rotated, so that the two changed alike do not cancel out.
        host = self.kept.host.trail()
        return self.table.trail() ^ ((host << 31 | host >> 32) & (1 << 63) - 1)
