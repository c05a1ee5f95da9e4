"""Mixtral: Mistral's layers with routed experts for the MLP."""

from __future__ import annotations

import torch

from mstar_tp.common.module_names import CheckpointRules
from mstar_tp.layers.moe import ExpertNames
from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder, PreNormLayer
from mstar_tp.models.blocks_moe import SparseMlp
from mstar_tp.models.config.families import ModelConfig

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


RULES = CheckpointRules(words=(("mlp", "block_sparse_moe"),))
"""The spellings of the block: published checkpoints', and other families' for stacked experts."""


class MixtralLayer(PreNormLayer):
    def build_feed_forward(self, config: ModelConfig, place: Placement, layer_index: int) -> None:
        self.block_sparse_moe = SparseMlp(config, place, _NAMES)

    def feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block_sparse_moe(x_TD)
        return out


class MixtralForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position, MixtralLayer))
