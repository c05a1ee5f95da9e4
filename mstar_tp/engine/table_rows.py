"""Rows of a rank's tables as plain data, for a person or as JSON. No token and no weight is shown.
No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a table; ``str`` of it is for a person. Adapters read name#generation."""


class StageRow(Row, frozen=True, kw_only=True):
    """One row of a table that each stage of a model has; unnamed where there is one stage."""

    stage: str = ""

    @property
    def prefix(self) -> str:
        return f"{self.stage} " if self.stage else ""


def in_stage(row: StageRow, stage: str) -> StageRow:
    """The row, of ``stage``'s table."""
    return msgspec.structs.replace(row, stage=stage) if stage else row


class SlotRow(StageRow, frozen=True, kw_only=True):
    """``used``: the admit clock when it was last taken or given back."""

    slot: int
    adapter: str | None
    holders: tuple[int, ...]
    used: int

    def __str__(self) -> str:
        held = f", held by {' '.join(map(str, self.holders))}" if self.holders else ""
        return (
            f"{self.prefix}slot {self.slot}: {self.adapter or 'empty'}{held}, used at {self.used}"
        )


class CpuCacheRow(StageRow, frozen=True, kw_only=True):
    """A held adapter, least recent first."""

    adapter: str
    fetch_no: int

    def __str__(self) -> str:
        return f"{self.prefix}{self.adapter}: hold {self.fetch_no}"


class ServedRow(StageRow, frozen=True, kw_only=True):
    """A name that new requests may use."""

    adapter: str

    def __str__(self) -> str:
        return f"{self.prefix}{self.adapter}"


class PageRow(Row, frozen=True, kw_only=True):
    """A request's pages, in the order of its tokens."""

    rid: int
    pages: tuple[int, ...]

    def __str__(self) -> str:
        return f"request {self.rid}: pages {spans(self.pages)}"


class HostPageRow(Row, frozen=True, kw_only=True):
    """A preempted request's pages in host memory, in the order of its tokens."""

    rid: int
    host_pages: tuple[int, ...]

    def __str__(self) -> str:
        return f"request {self.rid}: host pages {spans(self.host_pages)}"


class NamedPageRow(Row, frozen=True, kw_only=True):
    """A page that requests may lease, and the beginnings of what it is named by."""

    page: int
    name: str

    def __str__(self) -> str:
        return f"page {self.page} is named {self.name}"


class TokenRow(Row, frozen=True, kw_only=True):
    """The progress of a request; ``dead``: why no step runs it any more."""

    rid: int
    adapter: str | None
    num_prompt: int
    num_sampled: int
    num_computed: int
    dead: str | None

    def __str__(self) -> str:
        text = f"request {self.rid} on {self.adapter or 'the base'}: {self.num_prompt} prompt, "
        text += f"{self.num_sampled} sampled, {self.num_computed} computed"
        return text if self.dead is None else f"{text}; dead: {self.dead}"


def spans(pages: Sequence[int]) -> str:
    """Page numbers in their order, runs shortened: 3-5 9 8."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1:
            runs[-1][1:] = [page]
        else:
            runs.append([page])
    return " ".join("-".join(map(str, run)) for run in runs)
