"""Grammars that answers must match: built on the leader, on a thread of their own.

A request with a grammar waits for it before it enters the admission queue, as others wait for
copies: only the leader decides when a request runs, so no follower needs to know. Its mask follows
from its tokens alone, so it goes on over preemptions, refused steps and restarts of the ranks.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from mstar_tp.wire.values import Grammar

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 << 20
"""The bytes of grammars that were built and are kept for requests to come."""
MAX_WHITESPACE = 32
"""The most characters of white space in a row that JSON may have.

Without a bound, a model that is not sure writes nothing else.
"""
BUILD_S = 20.0
"""The seconds that one grammar may take: some patterns of a few characters take minutes."""
MAX_LATE = 2
"""The most grammars that took longer and are still being built.

Nothing can stop them; with so many, no other is begun.
"""
_NOT_JSON = re.compile(rb"[^\n\r -\xff]")
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""The time and source line that xgrammar's messages begin with."""


class TokenMask(Protocol):
    """The tokens that one request's grammar allows next. Step thread."""

    def apply(self, logits_V: torch.Tensor, output: Sequence[int]) -> None:
        """Set the logits of tokens that must not follow ``output`` to minus infinity, in place."""
        ...


class Vocabulary(NamedTuple):
    """The bytes that the token of each logit writes, and the tokens that end an answer.

    A token that grammars never allow has none.
    """

    tokens: list[bytes]
    end_ids: tuple[int, ...]


class GrammarFault(NamedTuple):
    """Why a grammar cannot be built."""

    cause: str


class GrammarMask:
    """xgrammar's matcher of one request, which takes the request's tokens as they come."""

    def __init__(self, matcher: Any, bitmask: torch.Tensor) -> None:
        self._matcher = matcher
        self._bitmask = bitmask
        self._taken = 0

    def apply(self, logits_V: torch.Tensor, output: Sequence[int]) -> None:
        import xgrammar

        for token in output[self._taken :]:
            if not self._matcher.accept_token(token):
                raise ValueError(f"token {token} is none that the request's grammar allows")
            self._taken += 1
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bitmask = self._bitmask.to(logits_V.device)
        xgrammar.apply_token_bitmask_inplace(logits_V.unsqueeze(0), bitmask)


class Grammars:
    """Builds grammars one after another.

    The thread starts with the first; xgrammar is imported there, which takes seconds that no start
    of a rank should. Each is built on a thread of its own, which is left behind when it takes too
    long, so that the next one's turn comes.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], wake: Callable[[], None]) -> None:
        """``vocabulary``: called once, on the thread; ``wake``: when one is built, or cannot be."""
        self._vocabulary = vocabulary
        self._wake = wake
        self._work: SimpleQueue[tuple[int, Grammar]] = SimpleQueue()
        self._built: SimpleQueue[tuple[int, GrammarMask | GrammarFault]] = SimpleQueue()
        self._info: Any = None
        self._compiler: Any = None
        self._num_logits = 0
        self._late: list[threading.Thread] = []
        # A daemon: a grammar that takes long must not keep a rank from ending.
        self._thread = threading.Thread(target=self._loop, name="grammars", daemon=True)

    def build(self, rid: int, grammar: Grammar) -> None:
        """Begin to build ``rid``'s grammar; never blocks. Main thread."""
        if self._thread.ident is None:
            self._thread.start()
        self._work.put((rid, grammar))

    def built(self) -> list[tuple[int, GrammarMask | GrammarFault]]:
        """Return what was built since the last call, in the order it was asked for.

        Main thread.
        """
        done = []
        while True:
            try:
                done.append(self._built.get_nowait())
            except Empty:
                return done

    def _loop(self) -> None:
        while True:
            rid, grammar = self._work.get()
            built = self._in_time(grammar)
            self._built.put((rid, built))
            self._wake()

    def _in_time(self, grammar: Grammar) -> GrammarMask | GrammarFault:
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= MAX_LATE:
            return GrammarFault("waits for others that take too long to build: try again later")
        made: SimpleQueue[GrammarMask | GrammarFault] = SimpleQueue()
        try:
            compiler = self._compiler or self._new_compiler()
        except Exception as error:
            return GrammarFault(f"cannot be made a grammar: {_first_line(error)}")
        self._compiler = compiler

        def build() -> None:
            try:
                made.put(self._build(compiler, grammar))
            except Exception as error:
                made.put(GrammarFault(f"cannot be made a grammar: {_first_line(error)}"))

        thread = threading.Thread(target=build, name="grammar", daemon=True)
        thread.start()
        try:
            return made.get(timeout=BUILD_S)
        except Empty:
            self._late.append(thread)
            self._compiler = None  # it may hold what the next build needs
            return GrammarFault(
                f"takes more than {BUILD_S:g} s to be made a grammar: use fewer or shorter "
                "repetitions and choices"
            )

    def _build(self, compiler: Any, grammar: Grammar) -> GrammarMask:
        import xgrammar

        if grammar.kind == "json_schema":
            compiled = compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
        else:
            compiled = compiler.compile_structural_tag(grammar.text)
        matcher = xgrammar.GrammarMatcher(compiled)
        bitmask = xgrammar.allocate_token_bitmask(1, self._num_logits)
        if matcher.fill_next_token_bitmask(bitmask) and not bitmask.any():
            raise ValueError("no answer matches it")
        return GrammarMask(matcher, bitmask)

    def _new_compiler(self) -> Any:
        import xgrammar

        if self._info is None:
            self._info = self._tokenizer_info()
        return xgrammar.GrammarCompiler(self._info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def _tokenizer_info(self) -> Any:
        import xgrammar

        vocabulary = self._vocabulary()
        if not vocabulary.end_ids:
            raise ValueError("this model has no token that ends an answer")
        self._num_logits = len(vocabulary.tokens)
        # Strings of a bounded length would take control characters, which JSON does not.
        tokens = [b"" if _NOT_JSON.search(token) else token for token in vocabulary.tokens]
        return xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self._num_logits,
            stop_token_ids=list(vocabulary.end_ids),
        )


def _first_line(error: Exception) -> str:
    text = _PLACE.sub("", str(error).strip()) or type(error).__name__
    return text.splitlines()[0][:300]
