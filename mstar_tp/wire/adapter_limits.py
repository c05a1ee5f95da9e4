"""Limits of an adapter: how it is kept, and its share beside others. Parts of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from mstar_tp.config import EngineConfig
from mstar_tp.config.limits import MAX_WEIGHT, MIN_WEIGHT, LimitsConfig


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one adapter, or of the base model, which is never pinned.

    ``pinned``: it never leaves the CPU cache, and a slot is kept for it. ``weight``: its share of
    the tokens where adapters take turns. ``max_rows``: how many of its requests run at once.
    ``max_queued``: how many of its requests the server holds; ranks do not read it.
    """

    pinned: bool = False
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    max_rows: Annotated[int, Meta(ge=1)] | None = None
    max_queued: Annotated[int, Meta(ge=1)] | None = None

    @classmethod
    def of(cls, config: LimitsConfig) -> AdapterLimits:
        """Return what the settings come to."""
        return cls(
            pinned=bool(config.pinned),
            weight=1.0 if config.weight is None else config.weight,
            max_rows=config.max_rows,
            max_queued=config.max_queued,
        )


NO_LIMITS = AdapterLimits()


def limits_by(config: EngineConfig) -> Callable[[str | None], AdapterLimits]:
    """Return a function from an adapter's name to the limits that the configuration gives.

    None names the base model.
    """
    lora = config.lora

    def limits_of(name: str | None) -> AdapterLimits:
        return NO_LIMITS if lora is None else AdapterLimits.of(lora.limits_of(name))

    return limits_of


class AdapterShare(msgspec.Struct, frozen=True, kw_only=True):
    """The rows and tokens of the requests on one adapter (None: the base model).

    ``share``: of the tokens, where all that have requests now wait without end. ``tokens``: those
    of their prompts and answers since it last had no request.
    """

    adapter: str | None
    """Its name: generations of one name share."""
    running: int
    waiting: int
    share: float
    tokens: int
    limits: AdapterLimits
