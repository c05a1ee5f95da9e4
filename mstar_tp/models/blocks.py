"""The parts that decoder families are put together from.

A family file says which, and in what order.

Legend: T tokens of the step, D hidden size, H and K this rank's query and key/value heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from mstar_tp.layers.activation import gelu_tanh_and_mul, silu_and_mul
from mstar_tp.layers.attention.attention import Attention, ForwardContext
from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.layers.rotary import RotaryEmbedding, RotaryTables
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.models.config.families import Activation, ModelConfig

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one GEMM."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate_proj": inner, "up_proj": inner}, place, bias=bias
        )
        self.down_proj = RowParallelLinear(inner, "down_proj", config.hidden_size, place, bias=bias)
        self.activate = ACTIVATIONS[config.activation]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]. Collective: the down projection's all_reduce."""
        out: torch.Tensor = self.down_proj(self.activate(self.gate_up_proj(x_TD)))
        return out


class SelfAttention(nn.Module):
    """Grouped-query attention over paged KV, heads dealt to the ranks.

    q and k have a norm a head where the family has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        layer_index: int,
        rope: RotaryEmbedding,
        *,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            place,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            "o_proj",
            config.hidden_size,
            place,
            in_units=config.num_heads,
            bias=config.o_bias,
        )
        self.num_heads = self.qkv_proj.num_local_heads
        self.num_kv_heads = self.qkv_proj.num_local_kv_heads
        self.head_dim = config.head_dim
        self.q_norm, self.k_norm = (
            _head_norm(config, place, name, unit_offset) if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        self.rope = rope
        self.attn = Attention(
            layer_index,
            self.num_heads,
            self.num_kv_heads,
            config.head_dim,
            config.scale,
            sliding_window=config.windows[layer_index],
        )

    def forward(
        self, angles: RotaryTables, x_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """[T, D] -> [T, D]; ``angles`` are the step's positions.

        Collective: the output projection's all_reduce.
        """
        q, k, v = self.qkv_proj(x_TD).split(self.qkv_proj.local_sizes, dim=-1)
        q_THE = q.unflatten(-1, (self.num_heads, self.head_dim))
        k_TKE = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THE, k_TKE = self.q_norm(q_THE), self.k_norm(k_TKE)
        q_THE, k_TKE = self.rope.rotate(angles, q_THE, k_TKE)
        out: torch.Tensor = self.o_proj(self.attn(q_THE.flatten(1), k_TKE.flatten(1), v, ctx))
        return out


class PreNormLayer(nn.Module):
    """One decoder layer with a norm before attention and one before the MLP (Llama's order)."""

    def __init__(
        self, config: ModelConfig, place: Placement, layer_index: int, rope: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, place, layer_index, rope)
        self.build_feed_forward(config, place, layer_index)
        self.input_layernorm = hidden_norm(config, place, "input_layernorm")
        self.post_attention_layernorm = hidden_norm(config, place, "post_attention_layernorm")

    def build_feed_forward(self, config: ModelConfig, place: Placement, layer_index: int) -> None:
        """Set the layer's feed-forward block under the name that the checkpoint gives it."""
        self.mlp: nn.Module = GatedMlp(config, place)

    def feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]. Collective: one all_reduce."""
        out: torch.Tensor = self.mlp(x_TD)
        return out

    def forward(
        self,
        angles: RotaryTables,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) -> (x, residual); their sum is the layer's output.

        Collective: two all_reduces.
        """
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.forward_add(x_TD, residual_TD)
        x_TD = self.self_attn(angles, x_TD, ctx)
        x_TD, residual_TD = self.post_attention_layernorm.forward_add(x_TD, residual_TD)
        return self.feed_forward(x_TD), residual_TD


class Decoder(nn.Module):
    """Token embedding, layers and final norm: what every decoder has.

    Checkpoint keys stand under "model.".
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        max_position: int,
        layer: Callable[[ModelConfig, Placement, int, RotaryEmbedding], nn.Module],
        *,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        kinds = tuple(dict.fromkeys(config.ropes))
        # One table a distinct rotary setting, shared by its layers; looked up once a step.
        self.ropes = nn.ModuleList(
            RotaryEmbedding(config.head_dim, kind, max_position, device=place.device)
            for kind in kinds
        )
        self._rope_of_layer = [kinds.index(rope) for rope in config.ropes]
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, place, name="embed_tokens"
        )
        self.layers = nn.ModuleList(
            layer(config, place, i, self._rope(i)) for i in range(config.num_layers)
        )
        self.norm = hidden_norm(config, place, "norm", unit_offset=unit_offset)

    def _rope(self, layer_index: int) -> RotaryEmbedding:
        rope = self.ropes[self._rope_of_layer[layer_index]]
        assert isinstance(rope, RotaryEmbedding)
        return rope

    def layer_angles(self, positions_T: torch.Tensor) -> list[RotaryTables]:
        """Each layer's angles of a step's positions, looked up once a distinct rotary setting."""
        dtype = self.embed_tokens.place.dtype
        tables = [rope.lookup(positions_T, dtype) for rope in self.ropes]  # type: ignore[operator]
        return [tables[i] for i in self._rope_of_layer]


class PreNormDecoder(Decoder):
    """A decoder of PreNormLayers."""

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        max_position: int,
        layer: type[PreNormLayer] = PreNormLayer,
    ) -> None:
        super().__init__(config, place, max_position, layer)

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Ids and positions [T] -> normed hidden states [T, D]. Collective."""
        x_TD: torch.Tensor = self.embed_tokens(ids_T)
        if ctx.given is not None:
            x_TD.index_copy_(0, ctx.given.places, ctx.given.hidden)
        residual_TD: torch.Tensor | None = None
        for layer, angles in zip(self.layers, self.layer_angles(positions_T), strict=True):
            x_TD, residual_TD = layer(angles, x_TD, residual_TD, ctx)
        assert residual_TD is not None, "a model has at least one layer"
        return self.norm.forward_add(x_TD, residual_TD)[0]


class LoraStage(NamedTuple):
    """A part of a model that has adapters of its own, and how its modules see a step.

    ``root`` holds the part's modules under their paths in the model. ``rows``: pattern of a path ->
    the rows that the linear sees, if not every token. ``image_tokens``: as many tokens an image the
    part runs; None: the step's own tokens.
    """

    name: str
    root: nn.Module
    rows: Mapping[str, RowGrouping]
    image_tokens: int | None


class CausalLM(nn.Module):
    """A decoder and its output head. ``config`` and ``place`` say what was built and where."""

    def __init__(self, config: ModelConfig, place: Placement, decoder: Decoder) -> None:
        super().__init__()
        self.config = config
        self.place = place
        self.model = decoder
        self.lm_head = ParallelHead(
            config.vocab_size,
            config.hidden_size,
            place,
            name="lm_head",
            tied=decoder.embed_tokens if config.tied_head else None,
        )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads that this rank's KV pages hold."""
        attention = self.model.layers[0].self_attn
        assert isinstance(attention, SelfAttention)
        return attention.num_kv_heads

    def lora_stages(self) -> tuple[LoraStage, ...]:
        """The model's parts, in the order a step runs them; a lone one has no name."""
        return (LoraStage("", self, {}, None),)

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """One step: token ids and positions [T] (int64) -> hidden states [T, D].

        Writes the step's keys and values into ``ctx.kv``. Collective on the model's group: every
        rank calls it with the same tokens.
        """
        out: torch.Tensor = self.model(ids_T, positions_T, ctx)
        return out

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor | None:
        """Logits [N, V] of the real vocabulary on rank 0, else None. Collective: one gather."""
        logits = self.lm_head.logits(hidden_ND)
        cap = self.config.final_softcap
        if logits is None or cap is None:
            return logits
        return torch.tanh(logits / cap) * cap


def hidden_norm(
    config: ModelConfig, place: Placement, name: str, *, unit_offset: bool = False
) -> RMSNorm:
    """A norm over the hidden size, called ``name`` under its parent."""
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        place.dtype,
        unit_offset,
        name=name,
        device=place.device,
    )


def _head_norm(config: ModelConfig, place: Placement, name: str, unit_offset: bool) -> RMSNorm:
    return RMSNorm(
        config.head_dim,
        config.rms_norm_eps,
        place.dtype,
        unit_offset,
        name=name,
        device=place.device,
    )
