"""Pages that requests share: found by the leader, leased in each admit, offered by who fills them.

No torch. Main finds, opens and closes; the step thread leases and offers.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.prefix import PageNames
from mstar_tp.wire.stats import PrefixStats


class SharedPages:
    """The named pages of ``table``. Without ``names``, requests share none and nothing happens."""

    def __init__(self, table: PageTable, names: PageNames | None) -> None:
        self._table = table
        self._names = names
        self.tokens_queried = 0
        """Tokens of the requests that joined a step."""
        self.tokens_cached = 0
        """Tokens of these that needed no computing."""

    @property
    def enabled(self) -> bool:
        """True where requests lease pages that others have computed."""
        return self._names is not None

    def stats(self) -> PrefixStats:
        """The pages that are kept, in numbers. Main; may run beside a step."""
        return PrefixStats(
            tokens_queried=self.tokens_queried,
            tokens_cached=self.tokens_cached,
            pages=self._table.num_named,
            evictions=self._table.evictions,
        )

    def open(self, rid: int) -> None:
        """A request was ingested. Main."""
        if self._names is not None:
            self._names.open(rid)

    def close(self, rid: int) -> None:
        """A request is removed. Main."""
        if self._names is not None:
            self._names.close(rid)

    def keep(self, rid: int, *, spoilt: bool) -> None:
        """Name what the request has computed before it gives its pages back. Main.

        ``spoilt`` pages lose their names: nobody else may use what they hold.
        """
        if self._names is None or not self._table.held(rid):
            return
        if spoilt:
            self._table.unname(rid)
        else:
            names = self._names.extend(rid)
            self._table.offer(rid, names, len(names))

    def find(self, rid: int, num_tokens: int) -> tuple[int, int]:
        """Count the named pages that a request begins with, and those that others hold. Main.

        The last of its ``num_tokens`` tokens is always computed: the next one is sampled from it.
        """
        if self._names is None or self._table.held(rid) or not self._names.num_queried(rid):
            return 0, 0
        most = (num_tokens - 1) // self._table.page_size
        keys = self._names.of(rid)[:most]
        keys = keys[: self._table.find(keys)]
        return len(keys), self._table.num_leased(keys)

    def joining(self, step: StepBatch) -> list[StepRow]:
        """The rows that join with this step, and so may lease pages."""
        if self._names is None:
            return []
        return [r for r in step.rows if r.start == r.cached and not self._table.held(r.rid)]

    def lease(self, tp_seq: int, row: StepRow) -> None:
        """Lease the pages that the row begins behind.

        Raises:
            LockstepError: pages that the leader found are not kept here.
        """
        assert self._names is not None
        keys = self._names.of(row.rid)[: row.cached // self._table.page_size]
        found = self._table.find(keys)
        if found * self._table.page_size != row.cached:
            raise LockstepError(
                f"step {tp_seq}: request {row.rid} begins behind {row.cached} tokens that the "
                f"leader found in kept pages, and here these hold {found} pages"
            )
        self._table.lease(row.rid, keys)

    def admitted(self, step: StepBatch, joined: Sequence[StepRow]) -> None:
        """Nothing can refuse the step any more: count who joined, and name the pages it fills."""
        if self._names is None:
            return
        for row in joined:
            self.tokens_queried += self._names.num_queried(row.rid)
            self.tokens_cached += row.cached
        for row in step.rows:
            num_full = (row.start + row.num_tokens) // self._table.page_size
            if num_full > row.start // self._table.page_size:
                self._table.offer(row.rid, self._names.of(row.rid), num_full)
