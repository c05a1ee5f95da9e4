"""Qwen2: Llama's layers with biases on q, k and v, windows on upper layers where switched on."""

from __future__ import annotations

from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder
from mstar_tp.models.config.families import ModelConfig


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position))
