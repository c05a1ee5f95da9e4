"""One answer in the making: tokens in, the text and log probabilities that may be shown out.

The same code runs whether the answer streams or not, so both give the same text. One task owns an
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mstar_tp.frontend.text.detokenizer import Detokenizer
from mstar_tp.frontend.text.stop_strings import StopStrings
from mstar_tp.frontend.text.tool_calls import CallPiece, ToolCallReader
from mstar_tp.wire.reports import Token, TokenLogprobs


class Entry(NamedTuple):
    """One shown token's log probabilities; ``offset`` is where its text begins.

    A prompt's first token follows nothing, so it has none.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None


class Delta(NamedTuple):
    """The change that one token made to an answer."""

    text: str
    entries: list[Entry]
    finish: str | None
    calls: Sequence[CallPiece] = ()

    @property
    def shows(self) -> bool:
        """Return whether there is anything in it."""
        return bool(self.text or self.entries or self.calls or self.finish is not None)


class Call(NamedTuple):
    """A whole tool call."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Gathered:
    """A whole answer from its deltas."""

    finish: str | None = None
    entries: list[Entry] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.entries += delta.entries
        self.finish = delta.finish
        for piece in delta.calls:
            if piece.id is not None and piece.name is not None:
                self.calls.append(Call(piece.id, piece.name, piece.arguments))
            else:
                call = self.calls[piece.place]
                self.calls[piece.place] = call._replace(arguments=call.arguments + piece.arguments)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of its tokens, by which answers are compared."""
        told = [entry.logprobs.chosen for entry in self.entries if entry.logprobs is not None]
        return sum(told) / len(told) if told else 0.0


class Echo(NamedTuple):
    """A prompt that its answer begins with: its ids, where the text of each begins, and its text.
    ``alone``: nothing that is generated is shown.
    """

    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    text: str
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0


class Answer:
    """The state of one answer between tokens."""

    __slots__ = (
        "_active_after",
        "_calls",
        "_detokenizer",
        "_echo",
        "_entries",
        "_include_stop",
        "_seen",
        "_shown",
        "_stops",
        "cached",
        "finish",
        "num_tokens",
        "slot",
        "stopped",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        options: AnswerOptions,
        echo: Echo | None = None,
        calls: ToolCallReader | None = None,
    ) -> None:
        """``calls``: finds those in its text, where the model may make any."""
        self._echo = echo
        self._calls = calls
        self._detokenizer = detokenizer
        self._stops = StopStrings(options.stops, include=options.include_stop)
        self._include_stop = options.include_stop
        self._active_after = options.min_tokens
        self._entries: list[Entry] = []
        self._seen = 0
        self._shown = 0
        self.num_tokens = 0
        """Tokens generated, the one that stopped the answer included."""
        self.slot = 0
        self.cached = 0
        """Tokens of the prompt that were not computed for it."""
        self.finish: str | None = None
        self.stopped = False
        """A stop string ended it: the ranks do not know yet."""

    def push(self, token: Token) -> Delta:
        """Take the next token. Nothing may be pushed after a finish."""
        assert self.finish is None, "a token after the end"
        if not self.num_tokens:
            self.cached = token.cached
        if self._echo is not None:
            return self._push_echo(self._echo, token)
        self.num_tokens += 1
        self.slot = token.slot
        text = self._text_of(token)
        if self.num_tokens > self._active_after:
            text, self.stopped = self._stops.push(text)
        if self.stopped:
            self.finish = "stop"
        elif token.finish is not None:
            self.finish = token.finish
            text += self._stops.finish()
        self._shown += len(text)
        entries = self._released() if self._entries else []
        if self._calls is None:
            return Delta(text, entries, self.finish)
        return self._with_calls(self._calls, Delta(text, entries, self.finish))

    def _with_calls(self, reader: ToolCallReader, delta: Delta) -> Delta:
        text, calls = reader.push(delta.text)
        if delta.finish is not None:
            end = reader.finish()
            text, calls = text + end.text, calls + end.calls
            if reader.count and delta.finish == "stop":
                self.finish = "tool_calls"
        return Delta(text, delta.entries, self.finish, calls)

    def _push_echo(self, echo: Echo, token: Token) -> Delta:
        """The first token brings the prompt along."""
        self._echo = None
        entries: list[Entry] = []
        if token.logprobs is not None:
            logprobs = (None, *token.prompt_logprobs)
            entries = [Entry(*of) for of in zip(echo.tokens, echo.offsets, logprobs, strict=True)]
        if echo.alone:
            self.slot = token.slot
            self.finish = "length"
            return Delta(echo.text, entries, self.finish)
        self._seen = self._shown = len(echo.text)
        first = self.push(token)
        return Delta(echo.text + first.text, entries + first.entries, first.finish)

    def _text_of(self, token: Token) -> str:
        hidden = token.finish == "stop" and not self._include_stop
        text = "" if hidden else self._detokenizer.push(token.token)
        if token.logprobs is not None and not hidden:
            self._entries.append(Entry(token.token, self._seen, token.logprobs))
        if token.finish is not None:
            text += self._detokenizer.finish()
        self._seen += len(text)
        return text

    def _released(self) -> list[Entry]:
        """The entries whose text has begun to be shown; at the end, all that the text still has."""
        if self.finish is not None:
            entries, self._entries = self._entries, []
            if self.stopped:
                entries = [entry for entry in entries if entry.offset < self._shown]
            return entries
        shown = 0
        while shown < len(self._entries) and self._entries[shown].offset < self._shown:
            shown += 1
        entries, self._entries = self._entries[:shown], self._entries[shown:]
        return entries
