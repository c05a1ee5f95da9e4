"""The names of a request's pages, by which others whose tokens begin alike lease them.

A page's name is a hash chain over all tokens up to its end, and a *root*: everything besides tokens
that their keys and values depend on. That is the model, and the digest of the adapter's weights or
that there is none. So no page is shared between adapters, between an adapter and the base, or
between two contents of one adapter's name.

From a request's first image on, pages have no names: tokens there stand for pixels. No torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mstar_tp.engine.resources.kv.pages import PageKey
from mstar_tp.engine.scheduling.requests import NO_TOKEN, Request, RequestTable
from mstar_tp.recording import NO_RECORDING, Recorder
from mstar_tp.recording.entries import PagesNamed
from mstar_tp.wire.values import AdapterKey

HASH_BYTES = 16

FingerprintOf = Callable[[AdapterKey], str | None]
"""The digest of how an adapter changes keys and values; None before every rank has read it."""


class PageNames(Protocol):
    """The names of requests' pages.

    Its owner is the page table's, but for ``open`` (main), which touches nothing that a step knows
    of.
    """

    def open(self, rid: int) -> None:
        """A request was ingested: its tokens so far may have names."""
        ...

    def of(self, rid: int) -> Sequence[PageKey]:
        """The names of the request's first pages, as far as they have any.

        These are full of tokens that were known when it was ingested or last extended. There are
        none in an admit that has not given it its slot yet.
        """
        ...

    def num_queried(self, rid: int) -> int:
        """The number of tokens that kept pages may hold: none if all must be computed."""
        ...

    def extend(self, rid: int) -> Sequence[PageKey]:
        """Name what the request has computed, while no step in flight names it.

        Returns the names of the pages it has filled; none where no admit asked for any.
        """
        ...

    def close(self, rid: int) -> None:
        """The request is removed; a no-op where it is not known."""
        ...


@dataclass(slots=True)
class _Chain:
    root: bytes | None = None
    contents: list[bytes] = field(default_factory=list)
    names: list[PageKey] = field(default_factory=list)


class PrefixNames:
    """The ``PageNames`` of a rank that serves."""

    def __init__(
        self,
        requests: RequestTable,
        page_size: int,
        model: str,
        fingerprint_of: FingerprintOf,
        recorder: Recorder = NO_RECORDING,
    ) -> None:
        """``model`` is the fingerprint of what the model's keys and values depend on."""
        self._requests = requests
        self._page_size = page_size
        self._model = model
        self._fingerprint_of = fingerprint_of
        self._recorder = recorder
        self._chains: dict[int, _Chain] = {}

    def open(self, rid: int) -> None:
        chain = self._chains[rid] = _Chain()
        request = self._requests[rid]
        self._hash(chain, request, len(request.tokens))

    def of(self, rid: int) -> Sequence[PageKey]:
        chain = self._chains[rid]
        if chain.root is None:
            root = chain.root = self._root(self._requests[rid].adapter)
            if root is None:
                return ()
            chain.names = [(root, content) for content in chain.contents]
            self._recorder.put(PagesNamed(rid=rid, root=root, contents=tuple(chain.contents)))
        return chain.names

    def num_queried(self, rid: int) -> int:
        request = self._requests[rid]
        if request.params.prompt_logprobs is not None and not request.num_output:
            return 0
        return len(request.tokens)

    def extend(self, rid: int) -> Sequence[PageKey]:
        chain = self._chains.get(rid)
        if chain is None or chain.root is None:
            return ()
        request = self._requests[rid]
        computed = num_computed(request)
        added = self._hash(chain, request, computed)
        if added:
            chain.names += [(chain.root, content) for content in added]
            self._recorder.put(PagesNamed(rid=rid, root=chain.root, contents=tuple(added)))
        return chain.names[: computed // self._page_size]

    def close(self, rid: int) -> None:
        self._chains.pop(rid, None)

    def _hash(self, chain: _Chain, request: Request, num_tokens: int) -> list[bytes]:
        """Hash on to the last page that ``num_tokens`` tokens fill; return what was added."""
        if request.images:
            num_tokens = min(num_tokens, request.images[0].start)
        first, count = len(chain.contents), num_tokens // self._page_size
        if count <= first:
            return []
        size = self._page_size
        tokens = array("i", request.tokens[first * size : count * size]).tobytes()
        page_bytes = len(tokens) // (count - first)
        content = chain.contents[-1] if chain.contents else b""
        added = []
        for start in range(0, len(tokens), page_bytes):
            page = tokens[start : start + page_bytes]
            content = hashlib.blake2b(content + page, digest_size=HASH_BYTES).digest()
            added.append(content)
        chain.contents += added
        return added

    def _root(self, adapter: AdapterKey | None) -> bytes | None:
        if adapter is None:
            return root_of("base", self._model)
        fingerprint = self._fingerprint_of(adapter)
        return None if fingerprint is None else root_of("adapter", self._model, fingerprint)


def num_computed(request: Request) -> int:
    """The number of tokens whose KV pages hold, once no step in flight names the request.

    Its last token is left out: a request that ended may have run it too, or not. So is what stands
    in the place of a token that a rank dropped, since the request had ended.
    """
    num_tokens = len(request.tokens) - (request.tokens[-1] == NO_TOKEN)
    return min(request.computed, num_tokens - 1)


def root_of(*parts: str) -> bytes:
    """The hash of a tagged tuple; other parts, or other borders between them, give another."""
    hashed = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()
