"""What an adapter may take: how it is kept, and what it gets beside others. No torch."""

from __future__ import annotations

import msgspec


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one adapter, or of the base model, which is never pinned.

    ``pinned``: it never leaves the host tier, and a slot is kept for it. ``weight``: its share of
    the tokens where adapters take turns. ``max_rows``: how many of its requests run at once.
    ``max_queued``: how many of its requests the server holds; ranks do not read it.
    """

    pinned: bool = False
    weight: float = 1.0
    max_rows: int | None = None
    max_queued: int | None = None


NO_LIMITS = AdapterLimits()


class AdapterShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests on one adapter (None: the base model) run and were given.

    ``share``: of the tokens, where all that have requests now wait without end. ``tokens``: those
    of their prompts and answers since it last had no request.
    """

    adapter: str | None
    running: int
    waiting: int
    share: float
    tokens: int
    limits: AdapterLimits
