"""Qwen3-MoE: Qwen3's layers with routed experts for the MLP, in all layers or some."""

from __future__ import annotations

from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder, PreNormLayer
from mstar_tp.models.blocks_moe import SparseMlp
from mstar_tp.models.config.families import ModelConfig


class Qwen3MoeLayer(PreNormLayer):
    def build_feed_forward(self, config: ModelConfig, place: Placement, layer_index: int) -> None:
        assert config.experts is not None, "the family's config has experts"
        if layer_index in config.experts.layers:
            self.mlp = SparseMlp(config, place)
        else:
            super().build_feed_forward(config, place, layer_index)


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position, Qwen3MoeLayer))
