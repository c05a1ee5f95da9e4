"""The typed messages that cross a socket.

Three streams, each numbered by its sender (see ``wire.channels``):

* conductor stream, frontend -> every rank, the same to each: the *bodies* (requests, loads);
* order stream, leader -> every follower: the *order* in which every rank applies those bodies and
  runs its steps (R1);
* reports, rank -> frontend and follower -> leader.

No torch here: the frontend imports this module.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mstar_tp.wire.figures import PrefixFigures, ProcessFigures, StepFigures
from mstar_tp.wire.shares import NO_LIMITS, AdapterLimits, AdapterShare


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of every message: frozen, keyword-only, tagged by its class name on the wire."""


FIRST_GENERATION = 0
"""Of the adapters an instance starts with; every load at run time gets a higher one."""


MAX_STATES = 1000
"""Adapters of a node in one state report."""


class AdapterKey(msgspec.Struct, frozen=True, order=True):
    """What every adapter table is keyed by: a name loaded again is a new generation."""

    name: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.generation}"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer's text must match: a JSON schema, or one of xgrammar's structural tags, which
    place such schemas between fixed texts. ``text`` is either's JSON; ``field``: the field of the
    request that asks for it.
    """

    kind: Literal["json_schema", "structural_tag"]
    text: str
    field: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence is sampled; the frontend resolves every field (no None means "default").

    ``seed`` keys the random numbers with the token's position, so a draw depends on nothing else.
    ``stop_token_ids`` already holds the model's end-of-sequence ids unless the request ignores
    them.
    ``logprobs`` is the number of top alternatives to report a token, None for no logprobs at all;
    ``prompt_logprobs`` is that for the prompt's tokens. ``logit_bias``: (token id, what is added to
    its logit), each id once. ``grammar``: only rank 0 reads it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None


# ------------------------------------------------------------- conductor stream (frontend -> ranks)


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt: it stands there for ``num_tokens`` tokens from ``start`` on.

    ``pixels``: uint8 [3, side, side], red, green and blue, of the size the model's tower reads.
    """

    start: int
    num_tokens: int
    pixels: bytes


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
    """In the order of their places in the prompt."""
    output: tuple[int, ...] = ()
    priority: int = 0
    request_id: str = ""
    """What its client, and every log line about it, call it."""


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
    """Every rank answers with its figures as soon as this arrives. It has a place in the order like
    every body, and decides nothing there.
    """

    query_id: int


class Locate(Message, frozen=True, kw_only=True):
    """Every rank answers with where these adapters are, as soon as this arrives; like a Measure."""

    query_id: int
    adapters: tuple[AdapterKey, ...]


class Validate(Message, frozen=True, kw_only=True):
    """Every rank judges the adapter in ``path`` as a Load would, whole, and keeps nothing. Begun as
    soon as this arrives; like a Measure.
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


# --------------------------------------------------------------- order stream (leader -> followers)


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's running hashes, one a table (R8); ``engine.checks`` says as of which point."""

    slots: int
    pages: int
    tier: int
    served: int
    tokens: int


class Step(Message, frozen=True, kw_only=True):
    """Run step ``tp_seq`` over ``rows`` of (rid, number of tokens), in this order.

    ``planned_after``: the last step whose outcome the leader knew when it planned this one (-1:
    none). Should a later one turn out refused, this step is void if it shares a row with it (R5).
    ``cached``: (rid, number of tokens) of rows that begin behind what pages hold already, which the
    row leases in this step's admit, on every rank the same.
    """

    ingested: int
    tp_seq: int
    planned_after: int
    rows: tuple[tuple[int, int], ...]
    checks: Checks
    cached: tuple[tuple[int, int], ...] = ()


class Remove(Message, frozen=True, kw_only=True):
    """Close ``rid``, between the admit of ``after_tp_seq`` (-1: none yet) and the next one (R3)."""

    ingested: int
    after_tp_seq: int
    rid: int


class Preempt(Message, frozen=True, kw_only=True):
    """Give back ``rid``'s pages. What they hold moves to host memory if ``offload``, until a step
    names the request again; else it is computed again then. Its adapter slot stays held.
    """

    ingested: int
    after_tp_seq: int
    rid: int
    offload: bool = False


class DropCopy(Message, frozen=True, kw_only=True):
    """Rank ``rank`` could not read the copy of hold ``hold_no``: every rank drops it, and the
    requests that wait on it end with ``cause`` (R7).
    """

    ingested: int
    after_tp_seq: int
    key: AdapterKey
    hold_no: int
    rank: int
    cause: str
    node: int = 0
    """Of the model's graph: each has a host tier of its own."""


class Forget(Message, frozen=True, kw_only=True):
    """Forget the slots of adapters that were unloaded and that no live request names."""

    ingested: int
    after_tp_seq: int


class Advance(Message, frozen=True, kw_only=True):
    """Apply conductor messages up to ``ingested``; nothing else follows at once.

    ``last``: a Shutdown is among them, and the leader leaves once its steps have ended.
    """

    ingested: int
    last: bool = False


OrderEntry = Step | Remove | Preempt | DropCopy | Forget | Advance


# --------------------------------------------------------------------- reports (follower -> leader)


class CopyIn(Message, frozen=True, kw_only=True):
    """This rank's copy of hold ``hold_no`` is in (``cause`` None, with its digest), or failed."""

    rank: int
    key: AdapterKey
    hold_no: int
    digest: str | None
    cause: str | None
    node: int = 0
    """Of the model's graph, whose part of the adapter it is."""


FollowerReport = CopyIn


# ----------------------------------------------------------------------- reports (rank -> frontend)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One linear that adapters may change, for messages and listings (full, unsharded sizes)."""

    name: str
    in_features: int
    out_features: int


class Ready(Message, frozen=True, kw_only=True):
    """This rank has loaded everything and will serve."""

    rank: int
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...]
    targets: tuple[Target, ...]
    cores: int = 1
    """That its steps keep busy, at most."""


class StartFailed(Message, frozen=True, kw_only=True):
    """This rank cannot start: one clear sentence for the operator."""

    rank: int
    cause: str


class Progress(Message, frozen=True, kw_only=True):
    """What a rank is doing while it starts, for a person who waits."""

    rank: int
    text: str


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token's log probability and the best alternatives, most likely first."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled token.

    ``finish`` is set on the last: "stop" (a stop token id, which it is) or "length".
    ``prompt_logprobs``, on the first of a request that asked for them: the prompt's tokens but its
    first one. ``queued_us``, on the first: how long the request waited for its first step.
    ``cached``, on the first: how many tokens were not computed for it, because kept pages held them
    when it first ran.
    """

    rid: int
    token: int
    finish: str | None = None
    slot: int = 0
    queued_us: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0


class Tokens(Message, frozen=True, kw_only=True):
    """What one step sampled, leader -> frontend."""

    tp_seq: int
    tokens: tuple[Token, ...]


class RequestFailed(Message, frozen=True, kw_only=True):
    """``rid`` ended without finishing: one clear sentence for its client.

    ``param``: the field of its request that is at fault, where that is the reason.
    """

    rid: int
    cause: str
    param: str | None = None


class LoadResult(Message, frozen=True, kw_only=True):
    """One rank's answer to a Load: accepted (``cause`` None) or refused and why.

    ``targets``: what it changes and, where a target's name does not say it all, how: ranks decide
    by it.
    """

    rank: int
    load_id: int
    cause: str | None
    adapter_rank: int = 0
    targets: tuple[str, ...] = ()


class LoadDone(Message, frozen=True, kw_only=True):
    """The leader applied a LoadCommit in order; ``cause`` says why its name is not served."""

    load_id: int
    cause: str | None


class AdapterDigest(Message, frozen=True, kw_only=True):
    """The digest all ranks agreed on when the adapter was first read; leader -> frontend."""

    key: AdapterKey
    digest: str


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    slot: int
    adapter: AdapterKey | None
    holders: tuple[int, ...]


class FailedRead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last read of an adapter failed, on ``rank`` first, in hold ``hold_no``."""

    adapter: AdapterKey
    hold_no: int
    rank: int
    cause: str
    node: str = ""
    """Whose part of the adapter it is, on a model of several nodes."""


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one adapter is on one rank, in one of the model's nodes."""

    adapter: AdapterKey
    node: str = ""
    slot: int | None = None
    """The device slot that has its weights, held or as a cache."""
    host: Literal["in", "reading", "failed"] | None = None
    """Its copy in the host tier; None: the tier does not hold it."""
    num_bytes: int = 0
    """Of this rank's copy, in memory or not."""
    hits: int = 0
    """Requests that found it in a slot."""
    installs: int = 0
    """Times it was copied into a slot."""
    evictions: int = 0
    """Times another took its slot."""
    running: int = 0
    """Live requests that hold its slot,"""
    waiting: int = 0
    """and those that wait: for its copy, a slot, pages, their turn."""
    cause: str | None = None
    """Why its last read failed on some rank, as far as this one knows."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The host tier's bound and what counts against it, in ``unit``s ("adapters" or "bytes").

    ``used`` follows from the order; ``pinned_bytes`` is this rank's memory for copies now, reads in
    flight and copies still moving to the device included, and ``peak`` the most that ever was in
    memory at once, in ``unit``.
    """

    unit: str
    capacity: int
    used: int
    peak: int
    pinned_bytes: int
    peak_bytes: int


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Slots and host tier of one of a model's nodes, by its name."""

    node: str
    slots: tuple[SlotState, ...]
    tier: tuple[AdapterKey, ...]
    host: TierState


class KvHostState(msgspec.Struct, frozen=True, kw_only=True):
    """KV of preempted requests in a rank's host memory; counters go up from its start."""

    pages_used: int = 0
    pages_total: int = 0
    offloads: int = 0
    reloads: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    recomputed_tokens: int = 0
    """Of preempted requests whose KV was given up."""


class StateReport(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's tables at an Inspect's place in the order.

    ``slots``, ``tier`` and ``host`` are the decoder's, ``other_nodes`` those that run before it.
    """

    rank: int
    query_id: int
    requests: tuple[int, ...]
    pages_used: int
    pages_total: int
    slots: tuple[SlotState, ...]
    tier: tuple[AdapterKey, ...]
    served: tuple[AdapterKey, ...]
    """What new requests may name, in the order they came."""
    host: TierState | None
    failed_reads: tuple[FailedRead, ...]
    """The leader's memory of reads that failed on any rank, oldest first; a later read that
    succeeds ends an entry."""
    waiting: int
    running: int
    steps: int
    steps_waited_for_read: int
    preemptions: int
    gap_us: int
    """Median time between two forwards over the last steps, idle times included."""
    checks: Checks
    other_nodes: tuple[NodeState, ...] = ()
    adapters: tuple[AdapterState, ...] = ()
    """Of every node, those in a slot, in the host tier or named by requests; at most
    ``MAX_STATES``."""
    kv_host: KvHostState = KvHostState()
    prefix: PrefixFigures = PrefixFigures()
    shares: tuple[AdapterShare, ...] = ()
    """Adapters with requests, the base model among them; the leader's."""
    waiting_for_reads: int = 0
    """Of those that wait: for some rank's copy of their adapter."""
    waiting_for_grammars: int = 0


class LoraFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's adapters in numbers; of one ``node`` where the model has several."""

    slots: int
    slots_held: int
    evictions: int
    agreed_failures: int
    """Copies that some rank could not read: dropped by all, or failed by all in an admit."""
    steps_waited_for_read: int
    adapters_held: int
    """In the host tier now."""
    adapters_taken: int
    """Into the host tier since the start, each with a read."""
    tier: TierState
    node: str = ""


class RankFigures(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One rank in numbers, wherever it was when the Measure came. Counters go up from its start."""

    rank: int
    query_id: int
    steps: int
    preemptions: int
    waiting: int
    """Requests that wait for copies or resources; only the leader has any."""
    running: int
    requests: int
    pages_used: int
    pages_total: int
    lora: tuple[LoraFigures, ...]
    """One a node, in graph order; none without adapters."""
    timing: StepFigures | None = None
    process: ProcessFigures | None = None
    kv_host: KvHostState = KvHostState()
    prefix: PrefixFigures = PrefixFigures()


class Located(Message, frozen=True, kw_only=True):
    """A rank's answer to a Locate; adapters that it does not know are left out."""

    rank: int
    query_id: int
    adapters: tuple[AdapterState, ...]


class Validated(Message, frozen=True, kw_only=True):
    """A rank's answer to a Validate: every problem, and what a LoadResult would say without any.

    ``num_bytes``: of this rank's copy.
    """

    rank: int
    query_id: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    adapter_rank: int = 0
    targets: tuple[str, ...] = ()
    num_bytes: int = 0


class Fatal(Message, frozen=True, kw_only=True, omit_defaults=True):
    """This rank stops the instance, and why. ``error``: the kind of error, by its class."""

    rank: int
    cause: str
    error: str = ""


RankReport = (
    Ready
    | StartFailed
    | Progress
    | Tokens
    | RequestFailed
    | LoadResult
    | LoadDone
    | AdapterDigest
    | StateReport
    | RankFigures
    | Located
    | Validated
    | Fatal
)
