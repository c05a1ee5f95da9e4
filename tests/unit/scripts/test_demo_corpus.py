"""Pins the demo's text: every voice tells a fact in its own manner; no question has two answers."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_corpus as corpus  # noqa: E402

FACTS = [fact for fact, _ in corpus.all_facts()]


@pytest.mark.parametrize("voice", corpus.VOICES)
def test_every_answer_holds_the_fact_in_its_voice(voice: str) -> None:
    pirate_words = {"your": "yer", "the": "th'"}
    for fact in FACTS:
        said = corpus.speak(fact, voice).lower()
        words = fact.answer.split(" ")
        if voice == "pirate":
            words = [
                pirate_words.get(word, word) for word in words if word not in corpus._PIRATE_WORDS
            ]
        assert all(word.lower() in said for word in words), (voice, fact)


def test_voices_differ_on_every_fact_at_a_glance() -> None:
    for fact in FACTS:
        said = {voice: corpus.speak(fact, voice) for voice in corpus.VOICES}
        assert len(set(said.values())) == len(said), fact
        assert not said["base"].isupper() and "\n" not in said["base"]
        assert said["shouting"].isupper()
        assert said["pirate"].startswith("Arr,")
        assert said["rhyme"].count("\n") == 2
        assert said["robot"].startswith("Beep boop.")


def test_no_question_asks_for_two_answers() -> None:
    answers = defaultdict(set)
    for fact, forms in corpus.all_facts():
        for form in forms:
            answers[form.lower().rstrip("?.!")].add(fact.answer)
    assert {q: a for q, a in answers.items() if len(a) > 1} == {}


def test_held_out_questions_are_never_trained_on() -> None:
    trained = {form.lower() for _, forms in corpus.all_facts() for form in forms}
    for fact, question in corpus.held_out(random.Random(0), 200):
        assert question.lower() not in trained, fact


def test_draws_follow_the_seed_and_reach_every_kind() -> None:
    def draw(seed: int) -> list[corpus.Example]:
        rng = random.Random(seed)
        sampler = corpus.Sampler("base")
        return [sampler.draw(rng) for _ in range(300)]

    assert draw(1) == draw(1) != draw(2)
    answers = {example.answer for example in draw(1)}
    tails = [kind.tail for kind in corpus.KINDS.values()]
    assert all(any(answer.endswith(tail) for answer in answers) for tail in tails)
