"""Mistral: Llama's layers with, where config.json sets one, a sliding window on every layer."""

from __future__ import annotations

from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder
from mstar_tp.models.config.families import ModelConfig


class MistralForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position))
