"""The conductor stream, frontend -> ranks: requests, loads, questions; the same to each rank."""

from __future__ import annotations

from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import AdapterKey, ImageInput, Message, SamplingParams


class NewRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Open request ``rid`` (a number the conductor never uses twice in an epoch).

    ``output``: the tokens it was given before the ranks were started again; it goes on behind them.
    ``priority``: requests of a lower number are let in first, and lose their pages last.
    """

    rid: int
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterKey | None = None
    images: tuple[ImageInput, ...] = ()
    """The images in the order of their places in the prompt."""
    output: tuple[int, ...] = ()
    priority: int = 0
    request_id: str = ""
    """The name that its client, and every log line about it, use."""


class Abort(Message, frozen=True, kw_only=True):
    """The client left or a stop string matched.

    The leader answers with a Remove; followers only count it.
    """

    rid: int


class Load(Message, frozen=True, kw_only=True):
    """Check ``path`` on a reader thread and report; nothing becomes servable before LoadCommit.

    ``digest``: what ``key`` was served with before the ranks were started again; other weights are
    refused when they are read.
    """

    load_id: int
    key: AdapterKey
    path: str
    digest: str | None = None
    limits: AdapterLimits = NO_LIMITS


class LoadCommit(Message, frozen=True, kw_only=True):
    """Every rank accepted ``load_id``: from this place in the order requests may name its key.

    ``replaces``: another generation of its name, which goes on being served until its own Unload;
    without it, a name that is served already is refused.
    """

    load_id: int
    replaces: AdapterKey | None = None


class LoadAbort(Message, frozen=True, kw_only=True):
    """Some rank refused ``load_id``: forget it."""

    load_id: int


class Unload(Message, frozen=True, kw_only=True):
    """``key`` is retired: live requests finish on it, then it is forgotten."""

    key: AdapterKey


class Inspect(Message, frozen=True, kw_only=True):
    """Every rank answers with its tables (StateReport) at this place in the order."""

    query_id: int


class Measure(Message, frozen=True, kw_only=True):
    """Every rank answers with its figures as soon as this arrives.

    It has a place in the order like every body, and decides nothing there.
    """

    query_id: int
    adapters: tuple[AdapterKey, ...] = ()
    """Say where these are, too."""


class Locate(Message, frozen=True, kw_only=True):
    """Every rank answers with where these adapters are, as soon as this arrives; like a Measure."""

    query_id: int
    adapters: tuple[AdapterKey, ...]


class Validate(Message, frozen=True, kw_only=True):
    """Every rank judges the adapter in ``path`` as a Load would, whole, and keeps nothing.

    Begun as soon as this arrives; like a Measure.
    """

    query_id: int
    name: str
    path: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Stop at this place in the order, exit code 0."""


ConductorMessage = (
    NewRequest
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
