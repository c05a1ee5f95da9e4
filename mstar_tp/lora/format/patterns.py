"""Patterns of module names in adapter configs, matched as PEFT matches them but in bounded time.

A pattern is the adapter's word, and ``re`` can take for ever over one while it holds the
interpreter. So patterns are matched here, by walking sets of positions: no pattern takes more than
(its length) x (the name's length, squared) steps. What is accepted means what it means to ``re``;
everything else is refused. No torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

MAX_PATTERN_CHARS = 200
MAX_REPEATS = 3
"""Repeats (``*``, ``+``, ``{m,n}``) in one pattern."""
MAX_GROUP_DEPTH = 8
MAX_INEXACT = 100
"""Patterns of one mapping that say more than a name: each of them is tried on every module."""

T = TypeVar("T")


class PatternError(Exception):
    """A pattern, or a mapping of them, is not accepted; the text says why."""


def matches(pattern: str, name: str) -> bool:
    """Tell whether the pattern matches the whole name.

    Raises:
        PatternError: the pattern is not one of those accepted here.
    """
    return len(name) in _matcher(pattern)(name, {0})


class Endings:
    """Texts that names may end in, anywhere within a word: the first given one wins.

    Costs by the number of lengths that they have, not by how many there are.
    """

    def __init__(self, endings: Iterable[str]) -> None:
        self._numbers = {ending: number for number, ending in enumerate(endings)}
        self._texts = list(self._numbers)
        self._lengths = sorted({len(ending) for ending in self._texts})

    def first(self, names: Sequence[str]) -> str | None:
        """The first ending that one of ``names`` has."""
        found = [self._numbers[e] for name in names for e in self._of(name) if e in self._numbers]
        return self._texts[min(found)] if found else None

    def without(self, names: Collection[str]) -> list[str]:
        """The endings that none of ``names`` has, in order."""
        seen = {ending for name in names for ending in self._of(name)}
        return [ending for ending in self._texts if ending not in seen]

    def _of(self, name: str) -> list[str]:
        return [name[len(name) - n :] for n in self._lengths if n <= len(name)]


class PatternTable(Generic[T]):
    """Values by pattern of a module's name or of a dotted tail of it; the first pattern wins.

    PEFT tries the patterns one after another. Here those that are no more than a name, as PEFT
    itself writes one for every module, are found by look-up, so a table may name a whole model.

    Raises:
        PatternError: at construction; a pattern is not accepted (named), or too many are more than
            names.
    """

    def __init__(self, values: Mapping[str, T]) -> None:
        self._values = list(values.values())
        self._names: dict[str, int] = {}
        """Patterns of letters, digits, ``_`` and dots -> their number."""
        self._by_length: dict[int, dict[int, list[tuple[int, str]]]] = {}
        """Those with dots that match any character, by length and number of dots: a name with fewer
        dots may match too. Escaped dots are spelled ``\\0``."""
        self._inexact: list[tuple[int, _Ends]] = []
        for number, pattern in enumerate(values):
            self._add(number, pattern)
        if len(self._inexact) > MAX_INEXACT:
            raise PatternError(
                f"has {len(self._inexact)} patterns that are more than names, wanted at most "
                f"{MAX_INEXACT}: let one pattern name several modules"
            )

    def get(self, module: str) -> T | None:
        """The value of the first pattern that matches, or None."""
        if not self._values:
            return None
        starts = [0, *(i + 1 for i, char in enumerate(module) if char == ".")]
        found = [n for start in starts for n in self._named(module[start:])]
        found += [n for n, ends in self._inexact if len(module) in ends(module, set(starts))]
        return self._values[min(found)] if found else None

    def _add(self, number: int, pattern: str) -> None:
        if not _NAME.fullmatch(pattern) or len(pattern) > MAX_PATTERN_CHARS:
            try:
                self._inexact.append((number, _matcher(pattern)))
            except PatternError as error:
                raise PatternError(f"{pattern!r} {error}") from None
            return
        self._names.setdefault(pattern.replace("\\.", "."), number)
        spelled = pattern.replace("\\.", "\0")
        if "." in spelled:
            by_dots = self._by_length.setdefault(len(spelled), {})
            dots = spelled.count(".") + spelled.count("\0")
            by_dots.setdefault(dots, []).append((number, spelled))

    def _named(self, tail: str) -> list[int]:
        number = self._names.get(tail)
        dots = tail.count(".")
        more = [
            n
            for pattern_dots, patterns in self._by_length.get(len(tail), {}).items()
            if pattern_dots > dots
            for n, spelled in patterns
            if _is_spelled(spelled, tail)
        ]
        return more if number is None else [number, *more]


def _is_spelled(spelled: str, name: str) -> bool:
    """Tell whether the characters are equal, where ``.`` stands for any and ``\0`` for a dot."""
    pairs = zip(spelled, name, strict=True)
    return all(c == "." if s == "\0" else s in (".", c) for s, c in pairs)


_NAME = re.compile(r"(?:[A-Za-z0-9_.]|\\\.)*")

_Ends = Callable[[str, set[int]], set[int]]
"""(name, positions a match may start at) -> positions it may end at."""

_ATOM = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9\s]|\[\^?[A-Za-z0-9_.\-]+\]|[A-Za-z0-9_.\-/ ]")
_REPEAT = re.compile(r"(?:([*+?])|\{([0-9]{1,3})(,([0-9]{1,3})?)?\})\??(?![*+?{])")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@functools.lru_cache(maxsize=4096)
def _matcher(pattern: str) -> _Ends:
    """Raises PatternError: it is not one of the patterns accepted here."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"has {len(pattern)} characters, wanted at most {MAX_PATTERN_CHARS}")
    return _PatternParser(pattern).parse()


class _PatternParser:
    """Parses literals, ``.``, classes, anchors, groups with ``|``, and repeats of one character.

    At most ``MAX_REPEATS`` of the repeats have no small bound.
    """

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._repeats = 0

    def parse(self) -> _Ends:
        ends = self._choice(0)
        if self._at < len(self._text):
            raise PatternError("has a ')' that nothing opened")
        return ends

    def _choice(self, depth: int) -> _Ends:
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self, depth: int) -> _Ends:
        parts: list[_Ends] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._part(depth))
        return _in_turn(parts)

    def _part(self, depth: int) -> _Ends:
        if self._take("("):
            return self._group(depth + 1)
        if self._take("^"):
            part = _at_start
        elif self._take("$"):
            part = _at_end
        else:
            return self._repeated(self._atom())
        self._refuse_repeat("an anchor")
        return part

    def _group(self, depth: int) -> _Ends:
        if not self._take("?:") and self._text.startswith("?", self._at):
            raise PatternError("has a group that starts with '(?', which is not accepted")
        if depth > MAX_GROUP_DEPTH:
            raise PatternError(f"nests groups more than {MAX_GROUP_DEPTH} deep")
        ends = self._choice(depth)
        if not self._take(")"):
            raise PatternError("has a group that does not end")
        self._refuse_repeat("a group")
        return ends

    def _atom(self) -> re.Pattern[str]:
        match = _ATOM.match(self._text, self._at)
        if match is None:
            raise PatternError(f"has {self._text[self._at :][:12]!r}, which is not accepted")
        self._at = match.end()
        try:
            return re.compile(match[0])
        except re.error as error:
            raise PatternError(f"has {match[0]!r}, which is no class: {error}") from None

    def _repeated(self, atom: re.Pattern[str]) -> _Ends:
        if not self._text.startswith(("*", "+", "?", "{"), self._at):
            return _run_of(atom, 1, 1)
        match = _REPEAT.match(self._text, self._at)
        if match is None:
            raise PatternError(f"has {self._text[self._at :][:12]!r}, which is no repeat")
        self._at = match.end()
        sign, low, comma, high = match.groups()
        if sign != "?":
            self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise PatternError(f"repeats more than {MAX_REPEATS} times")
        if sign is not None:
            return _run_of(atom, *_REPEATS[sign])
        most = int(high) if high else (None if comma else int(low))
        if most is not None and most < int(low):
            raise PatternError(f"has {match[0]!r}, whose bounds are the wrong way round")
        return _run_of(atom, int(low), most)

    def _refuse_repeat(self, what: str) -> None:
        if self._text.startswith(("*", "+", "?", "{"), self._at):
            raise PatternError(f"repeats {what}, which is not accepted")

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found


def _at_start(name: str, starts: set[int]) -> set[int]:
    return starts & {0}


def _at_end(name: str, starts: set[int]) -> set[int]:
    return starts & {len(name)}


def _in_turn(parts: list[_Ends]) -> _Ends:
    def ends(name: str, starts: set[int]) -> set[int]:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return ends


def _any_of(branches: list[_Ends]) -> _Ends:
    def ends(name: str, starts: set[int]) -> set[int]:
        return set().union(*(branch(name, starts) for branch in branches))

    return ends


def _run_of(atom: re.Pattern[str], low: int, high: int | None) -> _Ends:
    """``low`` to ``high`` characters that the one-character pattern ``atom`` matches."""

    def ends(name: str, starts: set[int]) -> set[int]:
        found: set[int] = set(starts) if low == 0 else set()
        count, at = 0, starts
        while at and (high is None or count < high):
            at = {i + 1 for i in at if i < len(name) and atom.match(name, i)}
            count += 1
            if count >= low:
                found |= at
        return found

    return ends
