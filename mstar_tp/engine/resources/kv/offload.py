"""Moving a preempted request's KV to host memory and back. No torch.

The leader decides who is offloaded, and orders it with the preemption. What moves then follows on
every rank alike: out before the next admit's rows take any page, back once an admit has given pages
to a step that runs the request. So tables change between two admits, or inside one, and all copies
are the step thread's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.wire.states import KvHostState


class Move(NamedTuple):
    """Pages of the device and their places in host memory, pair by pair."""

    pages: Sequence[int]
    host_pages: Sequence[int]


class PageCopies(Protocol):
    """Copies the contents of pages. Step thread; neither call waits for a device."""

    page_bytes: int

    def out(self, moves: Sequence[Move]) -> None:
        """Copy to host memory, before any later step writes the pages."""
        ...

    def back(self, moves: Sequence[Move]) -> None:
        """Copy to the device, before any later step reads the pages, behind every copy out."""
        ...


class NoCopies:
    """Copies for tables without memory behind them."""

    page_bytes = 0

    def out(self, moves: Sequence[Move]) -> None:
        """Nothing to move."""

    back = out


class KvOffload:
    """Host pages, and the copies that are still to be made. Threads as ``HostPages`` states them.

    Counters go up from the start and are the same on every rank.
    """

    def __init__(self, host: HostPages, copies: PageCopies) -> None:
        self.host = host
        self._copies = copies
        self._leaving: dict[int, Move] = {}
        """Moves that are not copied out yet: nothing has written their pages since."""
        self.offloads = 0
        self.reloads = 0
        self.pages_out = 0
        self.pages_back = 0
        self.recomputed_tokens = 0
        """Tokens whose KV was given up: they are computed a second time."""

    @property
    def enabled(self) -> bool:
        """True where the KV of a preempted request may move to host memory."""
        return self.host.num_pages > 0

    def fetches(self, rid: int) -> bool:
        """Return whether the request's KV lies in host memory: its next step brings it back."""
        return rid in self.host

    def state(self) -> KvHostState:
        """The counters for an operator. Any thread: each number as of some moment."""
        page_bytes = self._copies.page_bytes
        return KvHostState(
            pages_used=self.host.num_used,
            pages_total=self.host.num_pages,
            offloads=self.offloads,
            reloads=self.reloads,
            offloaded_bytes=self.pages_out * page_bytes,
            reloaded_bytes=self.pages_back * page_bytes,
            recomputed_tokens=self.recomputed_tokens,
        )

    def offload(self, rid: int, pages: Sequence[int]) -> None:
        """Keep what ``pages`` hold; the caller may give them away at once. Main thread."""
        self._leaving[rid] = Move(tuple(pages), self.host.take(rid, len(pages)))
        self.offloads += 1
        self.pages_out += len(pages)

    def forget(self, rid: int) -> None:
        """The request has ended. Main thread."""
        self._leaving.pop(rid, None)
        self.host.release(rid)

    def copy_out(self) -> None:
        """Copy out what leaves, before any page is taken by another request. Step thread."""
        if self._leaving:
            leaving, self._leaving = list(self._leaving.values()), {}
            self._copies.out(leaving)

    def reload(self, taken: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bring the requests' KV back into the pages that each has taken. Step thread.

        A page may be written over in host memory by what leaves later: copies run in their order.
        """
        moves = []
        for rid, pages in taken:
            host_pages = self.host.release(rid)
            moves.append(Move(tuple(pages[: len(host_pages)]), host_pages))
            self.reloads += 1
            self.pages_back += len(host_pages)
        self._copies.back(moves)
