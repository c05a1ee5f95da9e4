"""The requests a rank holds, with their tokens so far.

Owned by the main thread, which adds and removes entries. The step thread reads the rows of the step
it runs and, at that
step's commit, appends the sampled tokens; the main thread touches no request that a running step
names (R3, R4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.trail import Trail
from mstar_tp.wire.messages import NewRequest

NO_TOKEN = -1
"""In the place of a sampled token: the row failed on every rank alike."""


class Request:
    """One request: its prompt and output tokens, and how many of them the KV cache holds."""

    __slots__ = ("adapter", "computed", "dead", "params", "prompt_len", "rid", "tokens")

    def __init__(self, message: NewRequest) -> None:
        self.rid = message.rid
        self.params = message.params
        self.adapter = message.adapter
        self.tokens: list[int] = list(message.prompt)
        self.prompt_len = len(message.prompt)
        self.computed = 0
        self.dead: str | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """Tokens not yet in the KV cache: 1 for a decoding row, more while (re)computing the
        prompt.
        """
        return len(self.tokens) - self.computed


class RequestTable:
    """Every request this rank has ingested and not yet removed, in ingest order."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._trail = Trail()

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
        request = self._requests[message.rid] = Request(message)
        return request

    def remove(self, rid: int) -> Request | None:
        return self._requests.pop(rid, None)

    def build_step(self, tp_seq: int, rows: Sequence[tuple[int, int]]) -> StepBatch:
        """The frozen step of the leader's ``rows``; rows that died at an earlier admit are skipped
        (R5).
        """
        built = []
        for rid, num_tokens in rows:
            request = self._requests[rid]
            if request.dead is None:
                end = request.computed + num_tokens
                built.append(
                    StepRow(
                        rid=rid,
                        start=request.computed,
                        num_tokens=num_tokens,
                        samples=end == len(request.tokens),
                    )
                )
        return StepBatch(tp_seq=tp_seq, rows=tuple(built))

    def commit(self, step: StepBatch, sampled: Sequence[int]) -> None:
        """Record that ``step`` ran; ``sampled`` holds one token for each row that samples, in row
        order. Step thread.
        """
        tokens = iter(sampled)
        for row in step.rows:
            request = self._requests[row.rid]
            request.computed = row.start + row.num_tokens
            if row.samples:
                token = next(tokens)
                if token == NO_TOKEN:
                    request.dead = "no token could be chosen"
                else:
                    request.tokens.append(token)
        self._trail.add(step.tp_seq, *sampled)

    def trail(self) -> int:
        """Running hash of every sampled token, for R8."""
        return self._trail.value()
