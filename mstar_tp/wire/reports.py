"""Reports: rank -> frontend, and follower -> leader."""

from __future__ import annotations

import msgspec

from mstar_tp.wire.states import Located, RankStats, StateReport
from mstar_tp.wire.values import AdapterKey, Message


class CopyIn(Message, frozen=True, kw_only=True):
    """This rank's copy of hold ``fetch_no`` is in (``cause`` None, with its digest), or failed."""

    rank: int
    key: AdapterKey
    fetch_no: int
    digest: str | None
    cause: str | None
    stage: int = 0
    """The stage of the model whose part of the adapter it is."""


FollowerReport = CopyIn


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
    """The most cores that its steps keep busy."""


class StartFailed(Message, frozen=True, kw_only=True):
    """This rank cannot start: one clear sentence for the operator."""

    rank: int
    cause: str


class Progress(Message, frozen=True, kw_only=True):
    """The present work of a rank while it starts, for a person who waits."""

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
    """The tokens that one step sampled, leader -> frontend."""

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
    lora_rank: int = 0
    targets: tuple[str, ...] = ()


class LoadDone(Message, frozen=True, kw_only=True):
    """The leader applied a LoadCommit in order; ``cause`` says why its name is not served."""

    load_id: int
    cause: str | None


class AdapterDigest(Message, frozen=True, kw_only=True):
    """The digest all ranks agreed on when the adapter was first read; leader -> frontend."""

    key: AdapterKey
    digest: str


class Validated(Message, frozen=True, kw_only=True):
    """A rank's answer to a Validate: every problem, and what a LoadResult would say without any.

    ``num_bytes``: of this rank's copy.
    """

    rank: int
    query_id: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    lora_rank: int = 0
    targets: tuple[str, ...] = ()
    num_bytes: int = 0


class Leaving(Message, frozen=True, kw_only=True):
    """A signal has asked this rank to stop: it serves on until it is told to."""

    rank: int


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
    | RankStats
    | Located
    | Validated
    | Leaving
    | Fatal
)
