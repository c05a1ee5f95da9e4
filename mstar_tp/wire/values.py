"""The values that messages are made of, and their base.

Three streams, each numbered by its sender (see ``wire.channels``):

* conductor stream, frontend -> every rank, the same to each: the *bodies* (``wire.bodies``);
* order stream, leader -> every follower: the *order* in which every rank applies those bodies and
  runs its steps (R1; ``wire.orders``);
* reports, rank -> frontend and follower -> leader (``wire.reports``, ``wire.states``).

No torch in any of them: the frontend imports these modules.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of every message: frozen, keyword-only, tagged by its class name on the wire."""


FIRST_GENERATION = 0
"""The generation of the adapters an instance starts with; later loads get higher ones."""


class AdapterKey(msgspec.Struct, frozen=True, order=True):
    """The key of every adapter table: a name loaded again is a new generation."""

    name: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.generation}"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer's text must match.

    It is a JSON schema, or one of xgrammar's structural tags, which place such schemas between
    fixed texts. ``text`` is either's JSON; ``field``: the field of the request that asks for it.
    """

    kind: Literal["json_schema", "structural_tag"]
    text: str
    field: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The way one sequence is sampled.

    The frontend resolves every field: no None means "default".

    ``seed`` keys the random numbers with the token's position, so a draw depends on nothing else.
    ``stop_token_ids`` already holds the model's end-of-sequence ids unless the request ignores
    them.
    ``logprobs`` is the number of top alternatives to report a token, None for no logprobs at all;
    ``prompt_logprobs`` is that for the prompt's tokens. ``logit_bias``: (token id, what is added to
    its logit), each id once. ``grammar``: only rank 0 reads it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt: it stands there for ``num_tokens`` tokens from ``start`` on.

    ``pixels``: uint8 [3, side, side], red, green and blue, of the size the model's tower reads.
    """

    start: int
    num_tokens: int
    pixels: bytes
