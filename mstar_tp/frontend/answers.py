"""One answer in the making: tokens in, the text and log probabilities that may be shown out.

The same code runs whether the answer streams or not, so both give the same text. One task owns an
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mstar_tp.frontend.detokenizer import Detokenizer
from mstar_tp.frontend.stop_strings import StopStrings
from mstar_tp.wire.messages import Token, TokenLogprobs


class Entry(NamedTuple):
    """One shown token's log probabilities; ``offset`` is where its text begins. A prompt's first
    token follows nothing, so it has none.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None


class Delta(NamedTuple):
    """What one token added to an answer."""

    text: str
    entries: list[Entry]
    finish: str | None


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
        "_detokenizer",
        "_echo",
        "_entries",
        "_include_stop",
        "_seen",
        "_shown",
        "_stops",
        "finish",
        "num_tokens",
        "slot",
        "stopped",
    )

    def __init__(
        self, detokenizer: Detokenizer, options: AnswerOptions, echo: Echo | None = None
    ) -> None:
        self._echo = echo
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
        self.finish: str | None = None
        self.stopped = False
        """A stop string ended it: the ranks do not know yet."""

    def push(self, token: Token) -> Delta:
        """Take the next token. Nothing may be pushed after a finish."""
        assert self.finish is None, "a token after the end"
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
        return Delta(text, self._released() if self._entries else [], self.finish)

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
