"""The entries of a recording: all that a rank's tables follow from.

Nothing that a client wrote is in them.

Prompts, sampled tokens and weights are left out: of a prompt its length is kept, of a token whether
there was one, of a full page of tokens a hash. Entries of the main thread (bodies, order, copies)
stand in the order it applied them, those of the step thread name their step; how the two threads'
entries interleave says nothing.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from mstar_tp.wire.commands import (
    Abort,
    ConductorMessage,
    Inspect,
    Load,
    LoadAbort,
    LoadCommit,
    Locate,
    Measure,
    NewRequest,
    Shutdown,
    Unload,
    Validate,
)
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import ScheduleEntry
from mstar_tp.wire.values import AdapterKey, Message

FORMAT = 2
"""The number of the file's layout; ``schema_hash`` tells what its entries look like."""


class Start(Message, frozen=True, kw_only=True):
    """The first entry: whose recording it is, and the sizes of the tables it rebuilds."""

    format: int
    schema: str
    version: str
    rank: int
    world_size: int
    epoch: int
    config_digest: str
    num_pages: int
    page_size: int
    lora: tuple[LoraSizes, ...]
    """One a stage, in graph order; none without adapters."""
    deferred: bool = False
    """True when steps were committed while the next one ran."""
    num_host_pages: int = 0
    """The number of host pages for KV of preempted requests."""
    prefix_caching: bool = False


class LoraSizes(msgspec.Struct, frozen=True, kw_only=True):
    """``stage`` is empty where there is one. ``of_images``: only requests with images come to it.
    ``adapters``: those the instance starts with, in config order; ``pinned``: those of them that
    are.
    """

    stage: str = ""
    of_images: bool = False

    slots: int
    cpu_capacity: int
    cpu_unit: Literal["adapters", "bytes"]
    adapters: tuple[AdapterKey, ...]
    pinned: tuple[AdapterKey, ...] = ()


class Opened(Message, frozen=True, kw_only=True):
    """A NewRequest was applied: what it decides by."""

    rid: int
    num_prompt: int
    adapter: AdapterKey | None
    num_output: int = 0
    """Tokens it had before the ranks were started again."""
    has_images: bool = False


class Charged(Message, frozen=True, kw_only=True):
    """The cost in bytes of holding a registered adapter, where the CPU cache counts bytes."""

    key: AdapterKey
    cost: int
    stage: int = 0


class Untouched(Message, frozen=True, kw_only=True):
    """A registered adapter changes nothing in this stage of the model."""

    stage: int
    key: AdapterKey


class OverCapacity(Message, frozen=True, kw_only=True):
    """A load that every rank had accepted was refused: beside pinned adapters there is no room."""

    stage: int
    key: AdapterKey


class Checked(Message, frozen=True, kw_only=True):
    """This rank's own hashes of some tables, each as of the point the Step's are (R8)."""

    tp_seq: int
    hashes: dict[str, int]


class PagesNamed(Message, frozen=True, kw_only=True):
    """More names of a request's first pages, on every rank."""

    rid: int
    root: bytes
    contents: tuple[bytes, ...]


class Agreed(Message, frozen=True, kw_only=True):
    """The result of an agreement inside the admit of ``tp_seq``, on every rank."""

    tp_seq: int
    values: tuple[int, ...]


class Ran(Message, frozen=True, kw_only=True):
    """The end of a step on this rank.

    It names rows that failed and rows that got their last token, or says that the step was refused
    or void.

    A row that samples and is not among the failed got a token. Later steps skip both kinds.
    """

    tp_seq: int
    failed: tuple[int, ...]
    ended: tuple[int, ...]
    refused: bool


class TableDump(Message, frozen=True, kw_only=True):
    """A table's rows as they really were when its hash differed from the leader's."""

    tp_seq: int
    table: str
    rows: tuple[str, ...]


class Gap(Message, frozen=True, kw_only=True):
    """``lost`` entries are missing here: the disk did not keep up."""

    lost: int


class End(Message, frozen=True, kw_only=True):
    """The rank ended and closed its recording; without it, it was killed."""


RecordedCommand = (
    Opened
    | Abort
    | Load
    | LoadCommit
    | LoadAbort
    | Unload
    | Inspect
    | Measure
    | Locate
    | Validate
    | Shutdown
)
"""A conductor message as it is recorded."""

Entry = (
    Start
    | RecordedCommand
    | ScheduleEntry
    | CopyIn
    | Charged
    | Untouched
    | OverCapacity
    | Checked
    | PagesNamed
    | Agreed
    | Ran
    | TableDump
    | Gap
    | End
)


class Timed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry and when it was put: this machine's monotonic clock, which decides nothing."""

    at_ns: Annotated[int, msgspec.Meta(ge=0)]
    entry: Entry


def recorded_command(message: ConductorMessage) -> RecordedCommand:
    """Return what is recorded of a conductor message: never a prompt."""
    if isinstance(message, NewRequest):
        return Opened(
            rid=message.rid,
            num_prompt=len(message.prompt),
            adapter=message.adapter,
            num_output=len(message.output),
            has_images=bool(message.images),
        )
    return message


@cache
def schema_hash() -> str:
    """Hash of every entry's fields: a recording made with other ones cannot be read."""
    schema: dict[str, Any] = msgspec.json.schema(Timed)
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()[:16]
