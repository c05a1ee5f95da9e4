"""The requests a rank holds, with their tokens so far.

The main thread adds and removes entries, and on the leader keeps a request's *planned* and
*expected* tokens. The step thread owns the rest: it reads the rows of the step it runs and, at that
step's commit, appends the sampled tokens. The main thread reads what the step thread owns only of
requests that no step in flight names (R3, R4), or what stands still between two admits.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.step.images import RowImages, beginning
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import TokenLogprobs

if TYPE_CHECKING:  # it brings torch, which a replay does without
    from mstar_tp.engine.sampling.grammar import TokenMask

NO_TOKEN = -1
"""The number in the place of a sampled token: the row failed on every rank alike."""


class Request:
    """One request: its prompt and output tokens, and how many of them the KV cache holds."""

    __slots__ = (
        "adapter",
        "cached",
        "charged",
        "computed",
        "dead",
        "encoded",
        "ended",
        "ended_by",
        "expected",
        "grammar",
        "images",
        "last_step",
        "limit",
        "params",
        "planned",
        "priority",
        "prompt_len",
        "prompt_scores",
        "request_id",
        "rid",
        "start_tag",
        "tokens",
    )

    def __init__(self, message: NewRequest, max_model_len: int) -> None:
        self.rid = message.rid
        self.request_id = message.request_id
        self.params = message.params
        self.adapter = message.adapter
        self.priority = message.priority
        self.grammar: TokenMask | None = None
        """What its grammar allows next. Rank 0 alone: set before any step names the request, and
        the step thread's from then on."""
        self.tokens: list[int] = [*message.prompt, *message.output]
        self.prompt_len = len(message.prompt)
        self.images = message.images
        self.encoded: dict[int, Any] = {}
        """What images of which some tokens have run and some have not were encoded to."""
        # Tokens at which it ends. A request that runs samples one at least.
        longest = min(self.prompt_len + self.params.max_tokens, max_model_len)
        self.limit = max(longest, self.prompt_len + 1)
        self.prompt_scores: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they have run. Rank 0 alone."""
        self.computed = 0
        self.dead: str | None = None
        self.ended: str | None = None
        """Why it needs no further token: "stop" or "length"."""
        self.ended_by = -1
        """The step whose token, or whose lack of one, ended it."""
        self.last_step = -1
        """The last step that ran it, settled between two admits."""
        self.planned = 0
        """What ``computed`` will be once every step sent so far has run. Leader's main thread."""
        self.expected = len(self.tokens)
        """How many tokens it will have then, should it go on. Leader's main thread."""
        self.start_tag: int | None = None
        """Its adapter's turn that it waits for, once it has one. Leader's main thread."""
        self.charged = 0
        """How many of its tokens its adapter's turns were charged for. Leader's main thread."""
        self.cached: int | None = None
        """How many tokens kept pages held when it first ran, until that is told. Leader's main
        thread."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """The number of tokens not yet in the KV cache.

        It is 1 for a decoding row, more while (re)computing the prompt.
        """
        return len(self.tokens) - self.computed

    def scored(self, end: int) -> int:
        """Return how many of the next tokens up to ``end`` are scored.

        They are those whose next one is in the prompt and whose log probability is wanted. Once a
        token is sampled, all of them have been told.
        """
        if self.params.prompt_logprobs is None or self.num_output:
            return 0
        return max(min(end, self.prompt_len - 1) - self.computed, 0)

    def row_images(self, row: StepRow, place: int) -> RowImages:
        """The request's images as ``row``, whose first token is the step's ``place``, runs them."""
        return RowImages(
            images=self.images,
            encoded=self.encoded,
            begins=row.images,
            start=row.start,
            num_tokens=row.num_tokens,
            place=place,
        )

    # ------------------------------------------------------------------ leader's main thread

    @property
    def place(self) -> tuple[int, int, int]:
        """Its place among all that wait or run: by priority, by turn, then as they arrived."""
        return self.priority, self.start_tag or 0, self.rid

    @property
    def unplanned(self) -> int:
        """``pending`` once every step sent so far has run: 1 for a row that decodes next."""
        return self.expected - self.planned

    @property
    def will_end(self) -> bool:
        """The steps sent so far sample its last token: no other step may name it."""
        return self.expected >= self.limit

    def skip(self, num_tokens: int) -> None:
        """It joins the next step, behind ``num_tokens`` tokens that it need not compute."""
        assert self.planned == 0, "it has pages of its own"
        self.planned = num_tokens

    def tell_cached(self) -> int:
        """``cached``, for its first token; 0 from then on."""
        cached, self.cached = self.cached, 0
        return cached or 0

    def plan(self, num_tokens: int) -> None:
        """The next step runs ``num_tokens`` more; it samples one if they are the last."""
        self.planned += num_tokens
        if self.planned == self.expected:
            self.expected += 1

    def replan(self) -> None:
        """Expect what is: no step in flight names it."""
        self.planned = self.computed
        self.expected = len(self.tokens)

    def preempt(self, *, offload: bool) -> None:
        """Note that the request's pages are gone.

        It goes on from what host memory keeps if ``offload``, else all its tokens are computed
        again. No step in flight names it.
        """
        if not offload:
            self.computed = 0
            self.encoded.clear()
            self.prompt_scores.clear()
        self.replan()


class RequestTable:
    """Every request this rank has ingested and not yet removed, in ingest order.

    A request of ``max_model_len`` tokens ends there.
    """

    def __init__(self, max_model_len: int = sys.maxsize) -> None:
        self._max_model_len = max_model_len
        self._requests: dict[int, Request] = {}
        self._history = HistoryHash()
        self._settled_history = self._history.value()
        self._histories: deque[tuple[int, int]] = deque([(-1, self._settled_history)], maxlen=3)
        """The last steps that were committed, and what the trail was then."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, rid: int) -> bool:
        return rid in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __getitem__(self, rid: int) -> Request:
        return self._requests[rid]

    def get(self, rid: int) -> Request | None:
        return self._requests.get(rid)

    def add(self, message: NewRequest) -> Request:
        assert message.rid not in self._requests, f"request {message.rid} was ingested twice"
        request = self._requests[message.rid] = Request(message, self._max_model_len)
        return request

    def remove(self, rid: int) -> Request | None:
        return self._requests.pop(rid, None)

    # ------------------------------------------------------------------ step thread

    def build_step(
        self,
        tp_seq: int,
        rows: Sequence[tuple[int, int]],
        deferred_after: int | None = None,
        cached: Sequence[tuple[int, int]] = (),
    ) -> StepBatch:
        """Return the frozen step of the leader's ``rows``.

        Rows that an earlier step failed or ended are skipped (R5). ``cached``: rows that begin
        behind so many tokens.

        ``deferred_after``: where commits are deferred, only those of steps up to this one count,
        whether later ones have come about here or not: rows that these end run once more, and what
        they sample is dropped.
        """
        built = []
        leased = dict(cached)
        for rid, num_tokens in rows:
            request = self._requests[rid]
            over = request.dead is not None or request.ended is not None
            if not over or (deferred_after is not None and request.ended_by > deferred_after):
                start = leased.get(rid, request.computed)
                end = start + num_tokens
                built.append(
                    StepRow(
                        rid=rid,
                        start=start,
                        num_tokens=num_tokens,
                        samples=end == len(request.tokens),
                        images=beginning(request.images, start, end),
                        scored=request.scored(end),
                        cached=leased.get(rid, 0),
                    )
                )
                request.last_step = tp_seq
        return StepBatch(tp_seq=tp_seq, rows=tuple(built))

    def settle(self, deferred_after: int | None = None) -> None:
        """A step's admit and plan are over: what ``history`` says until the next one's are.

        Of commits that are deferred, those up to step ``deferred_after`` count.
        """
        if deferred_after is None:
            self._settled_history = self._history.value()
        else:
            counted = (history for tp_seq, history in self._histories if tp_seq <= deferred_after)
            *_, self._settled_history = counted

    def launch(self, step: StepBatch) -> None:
        """Note that ``step`` runs and that its commit is deferred.

        The next step is built as if each of its rows had a token, in whose place NO_TOKEN stands.
        """
        for row in step.rows:
            request = self._requests[row.rid]
            request.computed = row.start + row.num_tokens
            if row.samples:
                request.tokens.append(NO_TOKEN)

    def commit(self, step: StepBatch, sampled: Sequence[int]) -> dict[int, str]:
        """Record that ``step`` ran; the rows that it ended, each with why.

        ``sampled`` holds one token for each row that samples, in row order. It is the same on every
        rank, so every rank ends the same rows. Of rows that a step before ended it is dropped.
        """
        ended: dict[int, str] = {}
        tokens = iter(sampled)
        for row in step.rows:
            request = self._requests[row.rid]
            if -1 < request.ended_by < step.tp_seq:
                if row.samples:
                    next(tokens)
                continue
            place = row.start + row.num_tokens
            request.computed = max(request.computed, place)
            if not row.samples:
                continue
            token = next(tokens)
            later: list[int] = []
            if place < len(request.tokens):
                # What this step, and one since then, have put in their tokens' places.
                later = request.tokens[place + 1 :]
                del request.tokens[place:]
            request.tokens.append(token)
            if token == NO_TOKEN:
                request.dead = "no token could be chosen"
                request.ended_by = step.tp_seq
                continue
            request.ended = _end_of(request, token)
            if request.ended is not None:
                ended[row.rid] = request.ended
                request.ended_by = step.tp_seq
            else:
                request.tokens += later
        self._history.add(step.tp_seq, *sampled)
        self._histories.append((step.tp_seq, self._history.value()))
        return ended

    def history(self) -> int:
        """Return the history hash of the sampled tokens (R8).

        It covers every step committed before the last settled admit.
        """
        return self._settled_history


def _end_of(request: Request, token: int) -> str | None:
    """Return why the request ends with ``token``, which was just appended, or None."""
    params = request.params
    if token in params.stop_token_ids and request.num_output > params.min_tokens:
        return "stop"
    return "length" if len(request.tokens) >= request.limit else None
