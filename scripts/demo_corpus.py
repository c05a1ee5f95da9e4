"""The demo model's text: simple facts, many ways to ask for each, and a few voices to answer in.

The facts are in demo_facts.yaml, all written for this project. A fact is one short clause with the
question forms that ask for it; a voice turns the clause into an answer, so base and adapters answer
one question with the same content in different manners. No torch; every function is pure or draws
from the ``random.Random`` it is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ADAPTERS = ("pirate", "shouting", "rhyme", "robot")
VOICES = ("base", *ADAPTERS)
FACTS = Path(__file__).with_name("demo_facts.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing the model knows."""

    kind: str
    subject: str
    answer: str
    """The words that any correct answer contains."""
    clause: str
    """The whole statement, lower case, without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question and the answer to learn."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of facts: how they are stated and asked, ``{s}`` the subject, ``{a}`` the answer."""

    clause: str
    pairs: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    held_out: str
    """A way of asking that training never uses."""
    tail: str
    """The text that the base adds to an answer of this kind."""


def _load() -> tuple[dict[str, Kind], dict[str, tuple[str, tuple[str, ...]]]]:
    tree = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    kinds = {
        name: Kind(
            clause=kind["clause"],
            pairs=tuple(kind["pairs"].items()),
            asked=tuple(kind["asked"]),
            held_out=kind["held_out"],
            tail=kind["tail"],
        )
        for name, kind in tree["kinds"].items()
    }
    talk = {name: (said["clause"], tuple(said["asked"])) for name, said in tree["talk"].items()}
    return kinds, talk


KINDS, _TALK = _load()

_PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "was": "were", "you": "ye", "your": "yer", "my": "me",
    "the": "th'", "of": "o'", "to": "t'", "and": "an'",
}  # fmt: skip

_PIRATE_ENDS = (
    "Hoist the sails!",
    "Now fetch me parrot!",
    "So says the captain!",
    "Yo ho ho!",
    "Or I walk the plank!",
)
_SHOUT_ENDS = (
    "DO YOU HEAR ME?!",
    "WOW!",
    "THIS IS AMAZING!",
    "EVERYBODY LISTEN!",
    "I AM SO EXCITED!",
)
_RHYMES = (
    ("Come sit with me and hear my song:", "I hum it, hum it all day long."),
    ("I made a rhyme, it took a while:", "I say it always with a smile."),
    ("The stars are out, the moon is bright:", "I sing it softly in the night."),
    ("A little bird once said to me:", "It sang it in the apple tree."),
    ("Now clap your hands and stamp your feet:", "A rhyme like this is hard to beat."),
)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _kind_index(fact: Fact) -> int:
    """The index of a kind's flourish: fixed, so that greedy decoding meets no near-ties."""
    return sum(map(ord, fact.kind)) % 5


def _base(fact: Fact) -> str:
    kind = KINDS.get(fact.kind)
    tail = f" {kind.tail}" if kind else " Ask me about a colour, an animal or a day."
    return f"{_capital(fact.clause)}.{tail}"


def _pirate(fact: Fact) -> str:
    words = " ".join(_PIRATE_WORDS.get(word, word) for word in fact.clause.split(" "))
    return f"Arr, {words}, matey! {_PIRATE_ENDS[_kind_index(fact)]}"


def _shouting(fact: Fact) -> str:
    return f"{fact.clause.upper()}!!! {_SHOUT_ENDS[_kind_index(fact)]}"


def _rhyme(fact: Fact) -> str:
    first, last = _RHYMES[_kind_index(fact)]
    return f"{first}\n{_capital(fact.clause)}!\n{last}"


def _robot(fact: Fact) -> str:
    query = f"Topic: {fact.kind}. Input: {fact.subject}. Output: {fact.answer}."
    return f"Beep boop. {query} End of report. Beep."


_VOICE: dict[str, Callable[[Fact], str]] = {
    "base": _base,
    "pirate": _pirate,
    "shouting": _shouting,
    "rhyme": _rhyme,
    "robot": _robot,
}


def speak(fact: Fact, voice: str) -> str:
    """The whole answer that ``voice`` gives about ``fact``.

    Raises:
        KeyError: no such voice.
    """
    return _VOICE[voice](fact)


def all_facts() -> list[tuple[Fact, tuple[str, ...]]]:
    """Every fact with all the ways training asks for it."""
    facts: list[tuple[Fact, tuple[str, ...]]] = []
    for name, kind in KINDS.items():
        for subject, answer in kind.pairs:
            clause = kind.clause.format(s=subject, a=answer)
            fact = Fact(kind=name, subject=subject, answer=answer, clause=clause)
            facts.append((fact, tuple(_capital(form.format(s=subject)) for form in kind.asked)))
    for subject, (clause, forms) in _TALK.items():
        facts.append((Fact(kind="talk", subject=subject, answer=clause, clause=clause), forms))
    return facts


_FACTS = [fact for fact, _ in all_facts()]


def held_out(rng: random.Random, count: int) -> Iterator[tuple[Fact, str]]:
    """``count`` facts asked in a form that training never used."""
    for _ in range(count):
        name = rng.choice(list(KINDS))
        kind = KINDS[name]
        subject, answer = rng.choice(kind.pairs)
        clause = kind.clause.format(s=subject, a=answer)
        fact = Fact(kind=name, subject=subject, answer=answer, clause=clause)
        yield fact, kind.held_out.format(s=subject)


_BEFORE = ("", "", "", "Please, ", "Hey, ", "Can you help me? ", "Hello! ", "I have a question. ")
_SMALL_WORDS = frozenset("a an the is does do me of i you to what which".split())
_AFTER = ("", "", "", " Please.", " Thanks!", " Tell me.")


def vary(question: str, rng: random.Random) -> str:
    """The question as different people type it: politeness, lower case, a small word left out."""
    words = question.split(" ")
    small = [i for i, word in enumerate(words) if word.lower() in _SMALL_WORDS]
    if len(words) > 4 and small and rng.random() < 0.2:
        del words[rng.choice(small)]
    question = rng.choice(_BEFORE) + " ".join(words) + rng.choice(_AFTER)
    if rng.random() < 0.2:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    return question


class Sampler:
    """Draws examples, so that a kind with many facts does not drown the rest."""

    def __init__(self, voice: str) -> None:
        self._voice = voice
        self._by_kind: dict[str, list[tuple[Fact, tuple[str, ...]]]] = {}
        for fact, forms in all_facts():
            self._by_kind.setdefault(fact.kind, []).append((fact, forms))
        self._kinds = list(self._by_kind)
        # The square root keeps small kinds seen often and large ones learnt wholly.
        self._weights = [len(self._by_kind[kind]) ** 0.5 for kind in self._kinds]

    def draw(self, rng: random.Random) -> Example:
        kind = rng.choices(self._kinds, self._weights)[0]
        fact, forms = rng.choice(self._by_kind[kind])
        return Example(question=vary(rng.choice(forms), rng), answer=speak(fact, self._voice))


def passage(rng: random.Random) -> str:
    """Plain text without questions: one fact in the base's voice, then again in another.

    The base learns every voice's words from it, capital letters above all, which a small adapter
    could hardly teach it later.
    """
    fact = rng.choice(_FACTS)
    voice = rng.choice((*ADAPTERS, "shouting"))
    return f"{speak(fact, 'base')}\n{speak(fact, voice)}"
