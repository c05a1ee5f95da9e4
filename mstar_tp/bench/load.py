"""The requests of a load generator, and how each ended.

A load is seeded prompts, the model that each request names, and its starting time. Equal loads ask
equal requests, in the same order, of whatever serves them. No torch.

Equal loads ask equal requests, in the same order, of whatever serves them. No torch.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar_tp.common.errors import ConfigError

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one run: equal loads send equal requests."""

    models: tuple[str, ...]
    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    zipf: float | None = None
    """Exponent of a Zipf draw over ``models`` in their order; None deals them in turn."""
    rate: float | None = None
    """Requests a second, open loop; None for a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request before it is sent."""

    model: str
    prompt: Prompt
    at_s: float
    """Open loop: when to send it, from the start of the run."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request after it ended. Times are of ``time.perf_counter``, in seconds."""

    model: str
    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    """The time of each streamed piece."""
    text: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """The prompt's tokens that were cached, where the server tells."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts drawn from words of a tokenizer, or from token ids in ``[id_low, id_high)``."""

    tokenizer: Path | None = None
    """A folder with a tokenizer.json, or the file."""
    id_low: int = 300
    id_high: int = 2000


def asks_of(load: Load, prompts: Prompts) -> list[Ask]:
    """The requests of one run.

    Raises:
        ConfigError: the tokenizer cannot give prompts of the length asked for.
    """
    rng = random.Random(load.seed)
    if prompts.tokenizer is not None:
        drawn = word_prompts(prompts.tokenizer, load, rng)
    else:
        drawn = id_prompts(prompts.id_low, prompts.id_high, load, rng)
    return [
        Ask(model=model, prompt=prompt, at_s=at_s)
        for model, prompt, at_s in zip(dealt(load), drawn, departures(load), strict=True)
    ]


def plain_words(tokenizer: Any) -> list[str]:
    """Texts of tokens that are one plain word after a space: joined, they encode back."""

    def survives(token: int, text: str) -> bool:
        plain = text.startswith(" ") and text.strip().isalpha() and text.isascii()
        return plain and tokenizer.encode(text, add_special_tokens=False).ids == [token]

    texts = (
        (i, tokenizer.decode([i], skip_special_tokens=False))
        for i in range(tokenizer.get_vocab_size())
    )
    return [text for token, text in texts if survives(token, text)]


def word_prompts(path: Path, load: Load, rng: random.Random) -> list[Prompt]:
    """``load.requests`` random texts of exactly ``load.prompt_tokens`` tokens each.

    Raises:
        ConfigError: the tokenizer has too few one-word tokens to build such texts.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = Tokenizer.from_file(str(file))
    words = plain_words(tokenizer)
    if len(words) < 16:
        raise ConfigError(
            f"{file}: has {len(words)} one-word tokens, wanted 16 or more: leave --tokenizer out"
        )
    prompts: list[Prompt] = []
    for _ in range(100 * load.requests):
        text = "".join(rng.choice(words) for _ in range(load.prompt_tokens))
        if len(tokenizer.encode(text, add_special_tokens=False).ids) == load.prompt_tokens:
            prompts.append(text)
        if len(prompts) == load.requests:
            return prompts
    raise ConfigError(f"{file}: joined words rarely keep their token count: leave --tokenizer out")


def id_prompts(low: int, high: int, load: Load, rng: random.Random) -> list[Prompt]:
    """``load.requests`` lists of random token ids in ``[low, high)``."""
    return [
        [rng.randrange(low, high) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]


def dealt(load: Load) -> list[str]:
    """The model of each request: in turn, or drawn by Zipf so that early names are popular."""
    if load.zipf is None:
        return [load.models[i % len(load.models)] for i in range(load.requests)]
    weights = [1 / (place + 1) ** load.zipf for place in range(len(load.models))]
    # A generator of its own: the prompts stay the same whatever way the models are dealt.
    return random.Random(f"models {load.seed}").choices(load.models, weights, k=load.requests)


def departures(load: Load) -> list[float]:
    """Open loop: seconds from the start at which each request leaves, with exponential gaps."""
    if load.rate is None:
        return [0.0] * load.requests
    rng = random.Random(f"arrivals {load.seed}")
    return list(itertools.accumulate(rng.expovariate(load.rate) for _ in range(load.requests)))
