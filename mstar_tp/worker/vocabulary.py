"""The bytes that the model's tokens write, for the grammars that rank 0 builds."""

from __future__ import annotations

from mstar_tp.engine.sampling.grammar import Vocabulary
from mstar_tp.frontend.text.tokenizer import load_tokenizer
from mstar_tp.models.config.families import ModelConfig


def read_vocabulary(folder: str, config: ModelConfig) -> Vocabulary:
    """Return the vocabulary of the model in ``folder``, whose tokenizer is read.

    Raises:
        CheckpointError: there is none, or no token of it has bytes of its own.
    """
    tokenizer = load_tokenizer(folder)
    size = config.vocab_size
    ends = dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids))
    return Vocabulary(tokenizer.written(size), tuple(end for end in ends if end < size))
