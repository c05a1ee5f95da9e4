"""R8: a rank's tables as hashes, and the comparison with the leader's that a Step carries.

=========  ===================================================  ===================================
table      what its hash covers                                 as of
=========  ===================================================  ===================================
cpu_cache  every fetch and drop of the CPU cache, in order      the Step's place in the schedule
served     every commit, retirement and forgetting of a name    the Step's place in the schedule
slots      key, holders and clock of each slot, and how they    the admit of the step before, and
           came to be                                           the removes between the two
pages      every page taken, leased, named and given back, in   the same
           order, and those of host memory
tokens     every sampled token, by step                         the launch of the step before,
                                                                which may still run
=========  ===================================================  ===================================

The first two are compared on a follower's main thread, the others on the step thread of every rank,
before the step's admit. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.table_rows import HostPageRow, NamedPageRow, PageRow, Row, TokenRow
from mstar_tp.recording import Recorder
from mstar_tp.recording.entries import Checked, TableDump
from mstar_tp.wire.schedule import Checks

SCHEDULE_TABLES = ("cpu_cache", "served")
STEP_TABLES = ("slots", "pages", "tokens")
TABLES = SCHEDULE_TABLES + STEP_TABLES
NAMES_SHOWN = 64
"""The most names shown of the pages that requests may lease; there can be thousands."""


class TableChecks:
    """Hashes and rows of one rank's tables; each method on the thread that owns what it reads."""

    def __init__(
        self,
        rank: int,
        requests: RequestTable,
        kv: KvPool,
        lora: LoraPools | None,
        recorder: Recorder,
    ) -> None:
        self._rank = rank
        self._recorder = recorder
        self._requests = requests
        self._kv = kv
        self._lora = lora
        self._hashes: dict[str, Callable[[], int]] = {
            "pages": kv.history,
            "tokens": requests.history,
        }
        if lora is not None:
            self._hashes |= {
                "cpu_cache": lora.reports.cpu_cache_hash,
                "served": lora.reports.served_hash,
                "slots": lora.reports.slots_hash,
            }

    def now(self) -> Checks:
        """Every table's hash. Main thread, between two admits."""
        return Checks(**{table: self._hash(table) for table in TABLES})

    def verify(self, tp_seq: int, leader: Checks, tables: Sequence[str]) -> None:
        """Compare ``tables`` with the leader's, as of step ``tp_seq``.

        Raises:
            LockstepError: naming step, rank and table.
        """
        mine = {table: self._hash(table) for table in tables}
        self._recorder.put(Checked(tp_seq=tp_seq, hashes=mine))
        for table, value in mine.items():
            wanted: int = getattr(leader, table)
            if value != wanted:
                rows = tuple(str(row) for row in self.rows(table))
                self._recorder.put(TableDump(tp_seq=tp_seq, table=table, rows=rows))
                raise LockstepError(
                    f"rank {self._rank} step {tp_seq}: its table of {table} differs from the "
                    f"leader's ({value:#x} against {wanted:#x}); here: {'; '.join(rows) or 'empty'}"
                )

    def rows(self, table: str) -> tuple[Row, ...]:
        """Return what the table holds.

        Between two steps.
        """
        if table == "pages":
            held = ((request.rid, self._kv.table.held(request.rid)) for request in self._requests)
            rows = [PageRow(rid=rid, pages=tuple(pages)) for rid, pages in held if pages]
            host = self._kv.kept.host
            kept = [HostPageRow(rid=rid, host_pages=tuple(host.held(rid))) for rid in host.rids]
            named = [
                NamedPageRow(page=page, name=f"{root.hex()[:8]} {content.hex()[:8]}")
                for page, (root, content) in islice(self._kv.table.named(), NAMES_SHOWN)
            ]
            return (*rows, *kept, *named)
        if table == "tokens":
            return tuple(
                TokenRow(
                    rid=r.rid,
                    adapter=None if r.adapter is None else str(r.adapter),
                    num_prompt=r.prompt_len,
                    num_sampled=r.num_output,
                    num_computed=r.computed,
                    dead=r.dead,
                )
                for r in self._requests
            )
        return self._lora.reports.table_rows(table) if self._lora is not None else ()

    def _hash(self, table: str) -> int:
        take = self._hashes.get(table)
        return 0 if take is None else take()
