"""The adapter pools of a model, one a stage in the order they run, for whoever needs all of them.

A request whose adapter changes several stages needs a slot in each: the leader reserves all of them
at once, or none, and a step is admitted to each pool in graph order. Everything a rank does here is
one call a pool, so nothing is decided that pools do not decide. Threads are those of ``pool``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mstar_tp.engine.resources.base import AskFailed, StepBatch
from mstar_tp.engine.resources.lora.joint_loads import JointLoads
from mstar_tp.engine.resources.lora.joint_reports import JointReports
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.lora.spec import ZERO_SLOT, LoraReqConfig
from mstar_tp.lora.stage_specs import joint_digest
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import DropCopy
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    from mstar_tp.lora.device.tiles import TileBuffer


class LoraPools:
    """The ``pools`` in graph order, the language stage's last, and what joins them.

    Every pool's tables serve the same names.
    """

    def __init__(self, pools: Sequence[LoraAdapterPool]) -> None:
        assert [pool.stage.number for pool in pools] == list(range(len(pools)))
        self.pools = tuple(pools)
        self.loads = JointLoads(self.pools)
        self.reports = JointReports(self.pools)

    @property
    def decoder(self) -> LoraAdapterPool:
        """The pool of the stage that graphs are captured of."""
        return self.pools[-1]

    # ------------------------------------------------------- requests (main)

    def ingest_request(self, rid: int, config: LoraReqConfig) -> str | None:
        """Open a request; return why it can never run, or None. Idempotent."""
        causes = [pool.ingest_request(rid, config) for pool in self.pools]
        return causes[0]

    def remove_request(self, rid: int) -> None:
        """Close a request. At the fence (R3). A no-op for an unknown one."""
        for pool in self.pools:
            pool.remove_request(rid)

    def early_read(self, config: LoraReqConfig) -> None:
        """Maybe start the reads of a request that is not ordered yet (R2)."""
        key = config.adapter
        for pool in self.pools:
            if key is not None and pool.store.has_part(key) and pool.stage.runs(config.has_images):
                pool.fetches.read_early(key)

    def drop_copy(self, entry: DropCopy) -> None:
        """Drop a copy that some rank could not read (R7). At the fence."""
        self.pools[entry.stage].drop_copy(entry.key, entry.fetch_no, entry.rank, entry.cause)

    def fingerprint(self, key: AdapterKey) -> str | None:
        """The digest of how an adapter changes keys and values; None before every rank has read it.

        Equal on every rank once a row on it has its slot.
        """
        return self.decoder.fingerprint(key)

    def slots_of(self, rids: Collection[int]) -> dict[int, int]:
        """The slot each of these requests holds, the decoder's first; ZERO_SLOT for base rows."""
        slots = dict.fromkeys(rids, ZERO_SLOT)
        for pool in self.pools:
            if pool.tables.slots.any_held:
                slots |= {rid: slot for rid in rids if (slot := pool.slot_of(rid))}
        return slots

    # ------------------------------------------------------- the leader's view (main, leader)

    def copy_in(self, report: CopyIn) -> str | None:
        """Note one rank's report; the adapter's digest when it made a copy complete, else None.

        Of an adapter that changes several stages, it is the digest as far as it is known.
        """
        digest = self.pools[report.stage].copy_in(report)
        if digest is None or len(self.pools) == 1:
            return digest
        parts = ((p.stage.name, p.tables.copies.agreed(report.key)) for p in self.pools)
        return joint_digest({stage: part for stage, part in parts if part is not None})

    def needs_copies(self, rid: int) -> bool:
        """Return whether the request runs on an adapter in some pool."""
        return any(pool.needs_copy(rid) for pool in self.pools)

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """The state of the request's copies: IN, WAITING, or why it will never be admitted."""
        states = [pool.request_state(rid) for pool in self.pools]
        failed = next((state for state in states if isinstance(state, AskFailed)), None)
        if failed is not None:
            return failed
        return CopyState.WAITING if CopyState.WAITING in states else CopyState.IN

    def settled(self, waiting: Container[int]) -> list[tuple[int, CopyState | AskFailed]]:
        """Those of the ``waiting`` requests that need wait no more: IN, or why they never run."""
        if len(self.pools) == 1:
            return self.pools[0].settled(waiting)
        rids = dict.fromkeys(rid for pool in self.pools for rid, _ in pool.settled(waiting))
        states = ((rid, self.request_state(rid)) for rid in rids)
        return [(rid, state) for rid, state in states if state is not CopyState.WAITING]

    def failed_copies(self) -> list[tuple[LoraAdapterPool, AdapterKey, int, int, str]]:
        """(pool, adapter, fetch number, rank, cause) of failed copies in no slot.

        Each is for one ordered DropCopy, and returned once.
        """
        return [(pool, *failed) for pool in self.pools for failed in pool.failed_copies()]

    # ------------------------------------------------------- steps (step thread)

    def plan(self, step: StepBatch, tables: TileBuffer | None = None) -> None:
        """Lay the step out for every stage's deltas, which are current until it ends.

        ``tables`` is where a graph of the decoder reads its layout.
        """
        for pool in self.pools[:-1]:
            pool.plan(step)
        self.decoder.plan(step, tables)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """A forward outside any step on this thread: deltas add nothing.

        The plans that stood before come back.
        """
        with ExitStack() as stack:
            for pool in self.pools:
                stack.enter_context(pool.deltas.base_only())
            yield

    def close(self) -> None:
        """Stop the readers. Reads under way end by themselves and land nowhere."""
        for pool in self.pools:
            pool.close()
