"""KV pages as a resource of a step: the leader reserves them, every rank takes them in its admit.

A request reserves the pages of all its tokens so far when it is admitted to run, and takes them
chunk by chunk; pages for tokens it samples later are taken as it grows. When they run out the
scheduler preempts the youngest row, whose KV moves to host memory where it has room, and comes back
with the step that runs the row again.

With prefix caching, full pages are named by what they hold. The leader finds how much of a request
that joins a step is held already; the step says so, and in its admit every rank leases those pages,
before any row grows. Pages that a step fills have their names from its admit on: the next step's
forward runs behind this one's, so nobody reads a page before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch, StepRow
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload, NoCopies
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.prefix import PageNames
from mstar_tp.engine.resources.kv.sharing import SharedPages


class KvPool:
    """A ``Resource``: each row of a step needs pages for its tokens.

    The parts are public, and callers hold them: ``table`` knows who holds which page, ``sharing``
    which pages requests share, ``kept`` the KV in host memory. The page table's owner is stated in
    ``pages``. ``num_tokens_of`` gives a request's tokens (prompt and output) once every step sent
    has run. Requests share no pages without ``names``.
    """

    def __init__(
        self,
        table: PageTable,
        num_tokens_of: Callable[[int], int],
        offload: KvOffload | None = None,
        names: PageNames | None = None,
    ) -> None:
        """Without ``offload``, the KV of a preempted request is given up."""
        self.table = table
        self.kept = KvOffload(HostPages(0), NoCopies()) if offload is None else offload
        self._num_tokens_of = num_tokens_of
        self.sharing = SharedPages(table, names)
        self._reserved: dict[int, int] = {}
        self._found: dict[int, tuple[int, int]] = {}
        """Requests that reserved and hold nothing -> their kept pages, how many others hold.

        As of the reservation: nothing comes between it and the row's admit."""
        self._fresh: list[tuple[int, int]] = []
        self._leased: list[int] = []
        self._growth = 0

    # ------------------------------------------------------------------ main thread, leader only

    @property
    def unreserved(self) -> int:
        """Free pages that no reservation counts on."""
        owed = sum(max(0, pages - self._provided(rid)) for rid, pages in self._reserved.items())
        return self.table.num_free - owed

    def ask(self, rid: int) -> Ask | AskFailed | None:
        """Every request wants pages until it has reserved.

        One always fits alone: start-up refuses a max_model_len that the pages cannot hold.
        """
        return None if rid in self._reserved else Ask.ASKS

    def reserve(self, rid: int) -> int | None:
        """Count the pages of all the row's tokens so far; how many more than were spoken for."""
        wanted = self._wanted(rid)
        found = (0, 0)
        if not self.kept.fetches(rid):
            found = self.sharing.find(rid, self._num_tokens_of(rid))
        missing = max(0, wanted - max(len(self.table.held(rid)), found[1]))
        if missing > self.unreserved:
            return None
        self._reserved[rid] = wanted
        self._found[rid] = found
        return missing

    def unreserve(self, rid: int) -> None:
        """Forget the row's reservation; a no-op without one."""
        self._found.pop(rid, None)
        if self._reserved.pop(rid, None) is not None:
            self._growth += 1

    def cached_prefix(self, rid: int) -> int:
        """The tokens of a request that reserved which kept pages hold, for it to lease."""
        return self._found.get(rid, (0, 0))[0] * self.table.page_size

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
        """The mark that ``grew_since`` compares with."""
        return self._growth

    def grew_since(self, mark: int) -> bool:
        """Return whether pages or a reservation were given back."""
        return self._growth != mark

    def _wanted(self, rid: int) -> int:
        # One token more than there is: the row that just fits must not be preempted by its first
        # sample.
        return min(self.table.pages_for(self._num_tokens_of(rid) + 1), self.table.num_pages)

    def _provided(self, rid: int) -> int:
        """Pages that a request with a reservation need not take from the free ones."""
        return max(len(self.table.held(rid)), self._found.get(rid, (0, 0))[1])

    def can_offload(self, rid: int, num_tokens: int) -> bool:
        """Return whether host memory has room for a KV of ``num_tokens`` tokens. Pure."""
        count = self.reclaimable(num_tokens)
        return self.kept.fetches(rid) or (count > 0 and self.kept.host.fits(count))

    # ------------------------------------------------------------------ main thread, every rank

    def reclaimable(self, num_tokens: int) -> int:
        """The number of pages that an offload keeps of a request with KV of so many tokens."""
        return self.table.pages_for(num_tokens) if self.kept.enabled else 0

    def ingest_request(self, rid: int) -> None:
        """A request was opened."""
        self.sharing.open(rid)

    def remove_request(self, rid: int, *, spoilt: bool = False) -> None:
        """Give back the request's pages, here and in host memory.

        Nobody else may use what they hold if it is ``spoilt``.
        """
        self.kept.forget(rid)
        self._give_back(rid, spoilt)
        self.sharing.close(rid)

    def preempt(self, rid: int, num_tokens: int, *, offload: bool) -> None:
        """Take the pages of a request with KV of ``num_tokens`` tokens.

        Host memory keeps their contents if ``offload``; else the request computes again what other
        requests have not left in named pages.

        Raises:
            LockstepError: the leader says that they fit there, and they do not.
        """
        if not offload:
            self.kept.recomputed_tokens += num_tokens
            self.kept.forget(rid)
        elif not self.can_offload(rid, num_tokens):
            raise LockstepError(
                f"request {rid}: its KV of {num_tokens} tokens was to move to host memory, where "
                f"{self.kept.host.num_used} of {self.kept.host.num_pages} pages are used"
            )
        elif not self.kept.fetches(rid):
            self.kept.offload(rid, self.table.held(rid)[: self.reclaimable(num_tokens)])
        self._give_back(rid, spoilt=False)

    def _give_back(self, rid: int, spoilt: bool) -> None:
        self.sharing.keep(rid, spoilt=spoilt)
        self._found.pop(rid, None)
        reserved = self._reserved.pop(rid, None)
        if self.table.release(rid) or reserved is not None:
            self._growth += 1

    # ------------------------------------------------------------------ step thread

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Lease the pages that rows begin behind, then take new ones for the rest.

        Raises:
            LockstepError: pages that the leader found are not kept here.
        """
        self._fresh, self._leased = [], []
        self.kept.copy_out()
        joined = self.sharing.joining(step)
        for row in joined:
            if row.cached:
                self._lease(step.tp_seq, row)
        for row in step.rows:
            taken = self.table.try_grow(row.rid, row.start + row.num_tokens)
            if taken is None:
                return AdmitOutcome(
                    refused=f"step {step.tp_seq}: request {row.rid} found no free KV page "
                    f"({self.table.num_free} of {self.table.num_pages} free)"
                )
            if taken:
                self._fresh.append((row.rid, taken))
        self.sharing.admitted(step, joined)
        self.reload([row.rid for row in step.rows if self.kept.fetches(row.rid)])
        return AdmitOutcome()

    def reload(self, rids: Sequence[int]) -> None:
        """Bring back the KV of offloaded requests that hold pages again."""
        if rids:
            self.kept.reload([(rid, self.table.held(rid)) for rid in rids])

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back the pages that this admit took and leased."""
        for rid, count in reversed(self._fresh):
            self.table.shrink(rid, count)
        for rid in self._leased:
            self.table.release(rid)
        self._fresh, self._leased = [], []

    def commit(self, step: StepBatch) -> None:
        """The step is over: there is nothing to roll back."""
        self._fresh, self._leased = [], []

    def post_warmup_validate(self) -> None:
        """Check that no page is held.

        Raises:
            LockstepError: some are.
        """
        if self.table.num_used:
            raise LockstepError(f"{self.table.num_used} KV pages are still held after start-up")

    def history(self) -> int:
        """Running hash of every change of pages here and in host memory, for R8."""
        if not self.kept.enabled:
            return self.table.history()
        # Rotated, so that the two changed alike do not cancel out.
        host = self.kept.host.history()
        return self.table.history() ^ ((host << 31 | host >> 32) & (1 << 63) - 1)

    def _lease(self, tp_seq: int, row: StepRow) -> None:
        self.sharing.lease(tp_seq, row)
        self._leased.append(row.rid)
