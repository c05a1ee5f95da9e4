"""What a Granite's config.json says beyond a Llama's. Its place is
``models/config/families.py``, beside the families that stand there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mstar_tp.models.config.config_keys import Keys
from mstar_tp.models.config.families import ModelConfig, read_llama


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def read_granite(keys: Keys, eos_ids: tuple[int, ...]) -> GraniteConfig:
    """Llama's keys; ``attention_multiplier`` stands in for the usual scale of the scores."""
    llama = read_llama(keys, eos_ids)
    known = {field.name: getattr(llama, field.name) for field in fields(llama)}
    return GraniteConfig(
        **{**known, "scale": keys.number("attention_multiplier", 1.0)},
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
        logits_scaling=keys.number("logits_scaling", 1.0),
    )
