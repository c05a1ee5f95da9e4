"""KV pages as a resource of a step: what the leader reserves, what every rank takes at its admit.

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
from mstar_tp.engine.resources.kv.pages import PageKey, PageTable
from mstar_tp.engine.resources.kv.prefix import PageNames
from mstar_tp.wire.stats import PrefixStats


class KvPool:
    """Threads as ``Resource`` states them; the page table's owner is stated in ``pages``.

    ``num_tokens_of`` gives a request's tokens (prompt and output) once every step sent has run.
    ``names``: of the pages that requests may share; None where they share none.
    """

    def __init__(
        self,
        table: PageTable,
        num_tokens_of: Callable[[int], int],
        offload: KvOffload | None = None,
        names: PageNames | None = None,
    ) -> None:
        """``offload``: None where the KV of a preempted request is given up."""
        self.table = table
        self.kept = KvOffload(HostPages(0), NoCopies()) if offload is None else offload
        self._num_tokens_of = num_tokens_of
        self._names = names
        self._reserved: dict[int, int] = {}
        self._found: dict[int, tuple[int, int]] = {}
        """Of requests that reserved and hold nothing: pages that are kept, and how many of these
        others hold. As of the reservation, which nothing comes between and the row's admit."""
        self._fresh: list[tuple[int, int]] = []
        self._leased: list[int] = []
        self._growth = 0
        self.tokens_queried = 0
        """Of the requests that joined a step, and"""
        self.tokens_cached = 0
        """how many of these needed no computing."""

    @property
    def shares_pages(self) -> bool:
        """Return whether requests lease what others have computed."""
        return self._names is not None

    def prefix_stats(self) -> PrefixStats:
        """The pages that are kept, in numbers. Main; may run beside a step."""
        return PrefixStats(
            tokens_queried=self.tokens_queried,
            tokens_cached=self.tokens_cached,
            pages=self.table.num_named,
            evictions=self.table.evictions,
        )

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
        wanted = self._wanted(rid)
        found = self._find(rid)
        missing = max(0, wanted - max(len(self.table.held(rid)), found[1]))
        if missing > self.unreserved:
            return None
        self._reserved[rid] = wanted
        self._found[rid] = found
        return missing

    def unreserve(self, rid: int) -> None:
        self._found.pop(rid, None)
        if self._reserved.pop(rid, None) is not None:
            self._growth += 1

    def cached_prefix(self, rid: int) -> int:
        """Return how many tokens of a request that reserved are in kept pages, for it to lease."""
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
        return self._growth

    def grew_since(self, mark: int) -> bool:
        return self._growth != mark

    def _wanted(self, rid: int) -> int:
        # One token more than there is: the row that just fits must not be preempted by its first
        # sample.
        return min(self.table.pages_for(self._num_tokens_of(rid) + 1), self.table.num_pages)

    def _provided(self, rid: int) -> int:
        """Pages that a request with a reservation need not take from the free ones."""
        return max(len(self.table.held(rid)), self._found.get(rid, (0, 0))[1])

    def _find(self, rid: int) -> tuple[int, int]:
        """What ``_found`` keeps. The last token is always computed: it is what is sampled from."""
        if self._names is None or self.table.held(rid) or not self._names.num_queried(rid):
            return 0, 0
        if self.is_offloaded(rid):
            return 0, 0
        most = (self._num_tokens_of(rid) - 1) // self.table.page_size
        keys = self._names.of(rid)[:most]
        keys = keys[: self.table.find(keys)]
        return len(keys), self.table.num_leased(keys)

    def can_offload(self, rid: int, num_tokens: int) -> bool:
        """Whether host memory has room for the KV of the request's first ``num_tokens`` tokens, all
        that it has; pure.
        """
        count = self.reclaimable(num_tokens)
        return self.is_offloaded(rid) or (count > 0 and self.kept.host.fits(count))

    # ------------------------------------------------------------------ main thread, every rank

    @property
    def supports_eviction(self) -> bool:
        """Return whether any request's KV may move to host memory."""
        return self.kept.host.num_pages > 0

    def reclaimable(self, num_tokens: int) -> int:
        """Pages whose contents an offload keeps, of a request with KV of so many tokens."""
        return self.table.pages_for(num_tokens) if self.supports_eviction else 0

    def is_offloaded(self, rid: int) -> bool:
        """Return whether the request's KV lies in host memory: its next step brings it back."""
        return rid in self.kept.host

    def ingest_request(self, rid: int) -> None:
        """A request was opened."""
        if self._names is not None:
            self._names.open(rid)

    def remove_request(self, rid: int, *, spoilt: bool = False) -> None:
        """Give back the request's pages, here and in host memory.

        ``spoilt``: nobody else may use what they hold.
        """
        self.kept.forget(rid)
        self._give_back(rid, spoilt)
        if self._names is not None:
            self._names.close(rid)

    def preempt(self, rid: int, num_tokens: int, *, offload: bool) -> None:
        """Take the pages of a request with KV of ``num_tokens`` tokens, which host memory keeps if
        ``offload``; else it computes again what other requests have not left in named pages.

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
        elif not self.is_offloaded(rid):
            self.kept.offload(rid, self.table.held(rid)[: self.reclaimable(num_tokens)])
        self._give_back(rid, spoilt=False)

    def _give_back(self, rid: int, spoilt: bool) -> None:
        if self._names is not None and self.table.held(rid):
            if spoilt:
                self.table.unname(rid)
            else:
                names = self._names.extend(rid)
                self.table.offer(rid, names, len(names))
        self._found.pop(rid, None)
        reserved = self._reserved.pop(rid, None)
        if self.table.release(rid) or reserved is not None:
            self._growth += 1

    # ------------------------------------------------------------------ step thread

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Lease what rows begin behind, then grow.

        Raises:
            LockstepError: pages that the leader found are not kept here.
        """
        self._fresh, self._leased = [], []
        self.kept.copy_out()
        joined = [] if self._names is None else [r for r in step.rows if self._joins(r)]
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
        # Nothing can refuse the step any more.
        if self._names is not None:
            self._count(joined, self._names)
            self._offer(step, self._names)
        self.reload([row.rid for row in step.rows if self.is_offloaded(row.rid)])
        return AdmitOutcome()

    def reload(self, rids: Sequence[int]) -> None:
        """Bring back the KV of offloaded requests that hold pages again."""
        if rids:
            self.kept.reload([(rid, self.table.held(rid)) for rid in rids])

    def rollback_admit(self, step: StepBatch) -> None:
        for rid, count in reversed(self._fresh):
            self.table.shrink(rid, count)
        for rid in self._leased:
            self.table.release(rid)
        self._fresh, self._leased = [], []

    def commit(self, step: StepBatch) -> None:
        self._fresh, self._leased = [], []

    def pages_of(self, rid: int) -> Sequence[int]:
        return self.table.held(rid)

    def post_warmup_validate(self) -> None:
        if self.table.num_used:
            raise LockstepError(f"{self.table.num_used} KV pages are still held after start-up")

    def history(self) -> int:
        """Running hash of every change of pages here and in host memory, for R8."""
        if not self.supports_eviction:
            return self.table.history()
        # Rotated, so that the two changed alike do not cancel out.
        host = self.kept.host.history()
        return self.table.history() ^ ((host << 31 | host >> 32) & (1 << 63) - 1)

    # ------------------------------------------------------------------ inside an admit

    def _joins(self, row: StepRow) -> bool:
        return row.start == row.cached and not self.table.held(row.rid)

    def _lease(self, tp_seq: int, row: StepRow) -> None:
        keys = self._cached_keys(row)
        if self.table.find(keys) * self.table.page_size != row.cached:
            raise LockstepError(
                f"step {tp_seq}: request {row.rid} begins behind {row.cached} tokens that the "
                f"leader found in kept pages, and here these hold {self.table.find(keys)} pages"
            )
        self.table.lease(row.rid, keys)
        self._leased.append(row.rid)

    def _cached_keys(self, row: StepRow) -> Sequence[PageKey]:
        assert self._names is not None
        return self._names.of(row.rid)[: row.cached // self.table.page_size]

    def _count(self, joined: Sequence[StepRow], names: PageNames) -> None:
        for row in joined:
            self.tokens_queried += names.num_queried(row.rid)
            self.tokens_cached += row.cached

    def _offer(self, step: StepBatch, names: PageNames) -> None:
        for row in step.rows:
            num_full = (row.start + row.num_tokens) // self.table.page_size
            if num_full > row.start // self.table.page_size:
                self.table.offer(row.rid, names.of(row.rid), num_full)
