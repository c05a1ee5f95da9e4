"""The leader's view of every rank's copies: who has read what, and whether it is the same weights.

Plain data on the leader's main thread. A copy is in when every rank has reported it in with one
digest; the first digest that all ranks reported is the adapter's from then on, and a later copy
with another is a failure (R7). A failure is remembered past its fetch, for an operator:
until a later read succeeds, or the adapter is unloaded. It keeps no request from trying again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.states import FailedRead
from mstar_tp.wire.values import AdapterKey

MAX_REMEMBERED = 1000
"""Failed reads kept for an operator; the oldest go first."""


def unreadable(key: AdapterKey, rank: int, cause: str) -> str:
    """The message for a client whose adapter ``rank`` could not read."""
    return f"adapter {key.name!r} could not be read on rank {rank}: {cause}"


@dataclass(slots=True)
class _Copies:
    fetch_no: int
    digests: dict[int, str] = field(default_factory=dict)
    failure: tuple[int, str] | None = None
    """(rank, cause) of the first rank that could not read it."""
    announced: bool = False


class CopyTable:
    """One entry a fetched adapter; a report for another fetch number is ignored."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._copies: dict[AdapterKey, _Copies] = {}
        self._agreed: dict[AdapterKey, str] = {}
        self._failed: OrderedDict[AdapterKey, FailedRead] = OrderedDict()

    def open(self, key: AdapterKey, fetch_no: int) -> None:
        """Begin a new fetch of ``key``: no rank has its copy yet."""
        self._copies[key] = _Copies(fetch_no)

    def close(self, key: AdapterKey) -> None:
        """Drop the fetch; the agreed digest stays until ``forget``."""
        self._copies.pop(key, None)

    def forget(self, key: AdapterKey) -> None:
        """Forget an unloaded adapter, its digest too."""
        self.close(key)
        self._agreed.pop(key, None)
        self._failed.pop(key, None)

    def agree(self, key: AdapterKey, digest: str) -> None:
        """The adapter was served with this digest before the ranks were started again."""
        self._agreed[key] = digest

    def agreed(self, key: AdapterKey) -> str | None:
        """The digest every rank agreed on when the adapter was first read."""
        return self._agreed.get(key)

    def report(self, report: CopyIn) -> bool:
        """Note one rank's report; return whether it settled the copy: all in, or failed."""
        copies = self._copies.get(report.key)
        if copies is None or copies.fetch_no != report.fetch_no or copies.failure is not None:
            return False
        cause = report.cause or self._differs(copies, report)
        if cause is not None:
            copies.failure = (report.rank, cause)
            self._remember(report, cause)
            return True
        assert report.digest is not None, (
            f"{report.key} came in on rank {report.rank} without a digest"
        )
        copies.digests[report.rank] = report.digest
        if len(copies.digests) < self._world_size:
            return False
        self._agreed.setdefault(report.key, report.digest)
        self._failed.pop(report.key, None)
        return True

    def all_in(self, key: AdapterKey) -> bool:
        copies = self._copies.get(key)
        return (
            copies is not None
            and copies.failure is None
            and len(copies.digests) == self._world_size
        )

    def failure(self, key: AdapterKey) -> tuple[int, str] | None:
        """(rank, cause) when some rank could not read its copy of the present fetch."""
        copies = self._copies.get(key)
        return None if copies is None else copies.failure

    def last_failure(self, key: AdapterKey) -> FailedRead | None:
        """The failure of the last read of ``key``, if it failed."""
        return self._failed.get(key)

    def failed_reads(self) -> tuple[FailedRead, ...]:
        """The last read of each of these adapters failed; oldest failure first."""
        return tuple(self._failed.values())

    def unannounced(self) -> list[tuple[AdapterKey, int, int, str]]:
        """(adapter, fetch number, rank, cause) of failures not yet announced, oldest first."""
        return [
            (key, c.fetch_no, *c.failure)
            for key, c in self._copies.items()
            if c.failure is not None and not c.announced
        ]

    def announce(self, key: AdapterKey) -> None:
        """The failure of ``key``'s present fetch is on its way to every rank."""
        self._copies[key].announced = True

    def _remember(self, report: CopyIn, cause: str) -> None:
        self._failed.pop(report.key, None)
        self._failed[report.key] = FailedRead(
            adapter=report.key, fetch_no=report.fetch_no, rank=report.rank, cause=cause
        )
        if len(self._failed) > MAX_REMEMBERED:
            self._failed.popitem(last=False)

    def _differs(self, copies: _Copies, report: CopyIn) -> str | None:
        agreed = self._agreed.get(report.key)
        if agreed is not None and report.digest != agreed:
            return (
                f"adapter {report.key.name!r} on rank {report.rank} has digest {report.digest}, "
                "but it was "
                f"served with {agreed}: its file has changed; load it again under its name"
            )
        for rank, digest in copies.digests.items():
            if digest != report.digest:
                return (
                    f"adapter {report.key.name!r} has digest {report.digest} on rank "
                    f"{report.rank} and "
                    f"{digest} on rank {rank}: the ranks read different files; make them equal"
                )
        return None
