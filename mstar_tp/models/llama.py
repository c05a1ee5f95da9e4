"""Llama: pre-norm layers, grouped-query attention, gated SiLU MLP; biases where configured."""

from __future__ import annotations

from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder
from mstar_tp.models.config.families import ModelConfig


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position))
