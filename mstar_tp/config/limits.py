"""The limits of an adapter: settings that stand for several adapters and for one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mstar_tp.config.section import Positive, Section

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]


class LimitsConfig(Section):
    """The limits of one adapter, of the base model, or of adapters that have none of their own."""

    pinned: bool | None = None
    """Keep the adapter in every rank's CPU cache and in a slot that is kept for it; unset: no.

    Pinned adapters leave one slot at least for the others."""
    weight: Weight | None = None
    """Its share of the tokens beside that of others, with ``scheduling_policy: fair``; unset: 1."""
    max_rows: Positive | None = None
    """The most of its requests that run at once; unset: as many as fit.

    Further ones wait and keep nobody else waiting."""
    max_queued: Positive | None = None
    """The most of its requests that the server holds, running ones too, before it answers 429.

    Unset: as many as ``max_queue`` lets in, or, with ``scheduling_policy: fair``, as many as there
    are places left beside them."""

    def over(self, other: LimitsConfig) -> LimitsConfig:
        """These, and where they are unset those of ``other``."""
        mine = {key: value for key, value in self if value is not None}
        return other.model_copy(update=mine)
