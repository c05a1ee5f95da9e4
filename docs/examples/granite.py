"""Granite: Llama with four multipliers: of embeddings, of attention scores, of what a layer's two
halves add to the residual, and of logits. Its place is ``mstar_tp/models/``.

Legend: T tokens of the step, N rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from granite_config import GraniteConfig

from mstar_tp.layers.attention.attention import ForwardContext
from mstar_tp.layers.rotary import RotaryEmbedding, RotaryTables
from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, PreNormDecoder, PreNormLayer
from mstar_tp.models.config.families import ModelConfig


class GraniteLayer(PreNormLayer):
    def __init__(
        self, config: ModelConfig, place: Placement, layer_index: int, rope: RotaryEmbedding
    ) -> None:
        super().__init__(config, place, layer_index, rope)
        assert isinstance(config, GraniteConfig)
        self._multiplier = config.residual_multiplier

    def forward(
        self,
        angles: RotaryTables,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) -> (x, residual). Collective: two all_reduces."""
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.forward_add(x_TD, residual_TD)
        x_TD = self.self_attn(angles, x_TD, ctx) * self._multiplier
        x_TD, residual_TD = self.post_attention_layernorm.forward_add(x_TD, residual_TD)
        return self.feed_forward(x_TD) * self._multiplier, residual_TD


class GraniteDecoder(PreNormDecoder):
    def __init__(self, config: GraniteConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, max_position, GraniteLayer)
        self._multiplier = config.embedding_multiplier

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Ids and positions [T] -> normed hidden states [T, D]. Collective."""
        x_TD: torch.Tensor = self.embed_tokens(ids_T) * self._multiplier
        residual_TD: torch.Tensor | None = None
        for layer, angles in zip(self.layers, self.layer_angles(positions_T), strict=True):
            x_TD, residual_TD = layer(angles, x_TD, residual_TD, ctx)
        assert residual_TD is not None, "a model has at least one layer"
        return self.norm.forward_add(x_TD, residual_TD)[0]


class GraniteForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        assert isinstance(config, GraniteConfig)
        super().__init__(config, place, GraniteDecoder(config, place, max_position))
        self._logits_scaling = config.logits_scaling

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor | None:
        """Logits [N, V] of the real vocabulary on rank 0, else None. Collective: one gather."""
        logits = super().compute_logits(hidden_ND)
        return None if logits is None else logits / self._logits_scaling
