"""Gemma 3 (text): sliding and full layers, two rotary bases, norms around both halves of a layer.

Norm weights are offsets from one, embeddings are scaled by sqrt(hidden size), and attention scores
by ``query_pre_attn_scalar``. The residual is added after the trailing norm, so no norm is fused
with an addition.
"""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.layers.attention.attention import ForwardContext
from mstar_tp.layers.rotary import RotaryEmbedding, RotaryTables
from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import CausalLM, Decoder, GatedMlp, SelfAttention, hidden_norm
from mstar_tp.models.config.families import ModelConfig

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3Layer(nn.Module):
    def __init__(
        self, config: ModelConfig, place: Placement, layer_index: int, rope: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, place, layer_index, rope, unit_offset=True)
        self.mlp = GatedMlp(config, place)
        (
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.post_feedforward_layernorm,
        ) = (hidden_norm(config, place, name, unit_offset=True) for name in _NORMS)

    def forward(
        self, angles: RotaryTables, x_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """[T, D] -> [T, D]; ``angles`` are the step's positions. Collective: two all_reduces."""
        attended_TD = self.self_attn(angles, self.input_layernorm(x_TD), ctx)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        fed_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        out_TD: torch.Tensor = x_TD + self.post_feedforward_layernorm(fed_TD)
        return out_TD


class Gemma3Decoder(Decoder):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, max_position, Gemma3Layer, unit_offset=True)
        # The model was trained with the scale rounded to the weights' dtype.
        self._embed_scale = torch.tensor(config.hidden_size**0.5, dtype=place.dtype).item()

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Ids and positions [T] -> normed hidden states [T, D]. Collective."""
        x_TD: torch.Tensor = self.embed_tokens(ids_T) * self._embed_scale
        for layer, angles in zip(self.layers, self.layer_angles(positions_T), strict=True):
            x_TD = layer(angles, x_TD, ctx)
        out_TD: torch.Tensor = self.norm(x_TD)
        return out_TD


class Gemma3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, Gemma3Decoder(config, place, max_position))
