"""CLIP's vision tower: patches and a class token through pre-norm layers that see whole images.

Legend: N images, T tokens an image, R rows (N * T), D hidden size, H this rank's heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from mstar_tp.layers.norm import LayerNorm
from mstar_tp.layers.patches import ImageEmbeddings, gelu_tanh, quick_gelu
from mstar_tp.layers.weights import Placement
from mstar_tp.models.config.config_vision import VisionActivation, VisionConfig

ACTIVATIONS: dict[VisionActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}


class ClipAttention(nn.Module):
    """Attention among the tokens of one image, heads dealt to the ranks."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.head_dim = size // heads
        self.qkv_proj = QKVParallelLinear(
            size, place, num_heads=heads, num_kv_heads=heads, head_dim=self.head_dim, bias=True
        )
        self.out_proj = RowParallelLinear(size, "out_proj", size, place, in_units=heads, bias=True)

    def forward(self, x_RD: torch.Tensor, num_images: int) -> torch.Tensor:
        """[R, D] -> [R, D]. Collective: the output projection's all_reduce."""
        q, k, v = (
            part.view(num_images, -1, part.shape[-1] // self.head_dim, self.head_dim).transpose(
                1, 2
            )
            for part in self.qkv_proj(x_RD).split(self.qkv_proj.local_sizes, dim=-1)
        )
        seen_NHTE = F.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out_proj(seen_NHTE.transpose(1, 2).reshape(len(x_RD), -1))
        return out


class ClipMlp(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.fc1 = column(size, "fc1", inner, place, bias=True)
        self.fc2 = RowParallelLinear(inner, "fc2", size, place, bias=True)
        self._activate = ACTIVATIONS[config.activation]

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        """[R, D] -> [R, D]. Collective: fc2's all_reduce."""
        out: torch.Tensor = self.fc2(self._activate(self.fc1(x_RD)))
        return out


class ClipLayer(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.self_attn = ClipAttention(config, place)
        self.mlp = ClipMlp(config, place)
        self.layer_norm1 = _norm(config, place, "layer_norm1")
        self.layer_norm2 = _norm(config, place, "layer_norm2")

    def forward(self, x_RD: torch.Tensor, num_images: int) -> torch.Tensor:
        """[R, D] -> [R, D]. Collective: two all_reduces."""
        x_RD = x_RD + self.self_attn(self.layer_norm1(x_RD), num_images)
        out_RD: torch.Tensor = x_RD + self.mlp(self.layer_norm2(x_RD))
        return out_RD


class ClipEncoder(nn.Module):
    """All layers, so that whatever names one finds it; the first ``num_used_layers`` run."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ClipLayer(config, place) for _ in range(config.num_layers))
        self._num_used = config.num_used_layers

    def forward(self, x_NTD: torch.Tensor) -> torch.Tensor:
        """[N, T, D] -> [N, T, D]. Collective: two all_reduces a layer."""
        x_RD = x_NTD.flatten(0, 1)
        for layer in self.layers[: self._num_used]:
            x_RD = layer(x_RD, len(x_NTD))
        return x_RD.view(x_NTD.shape)


class ClipTower(nn.Module):
    """The tower, without its last norm: who reads an inner layer's output has no use for it."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.embeddings = ImageEmbeddings(
            config.hidden_size, config.patch_size, config.num_patches, place
        )
        self.pre_layrnorm = _norm(config, place, "pre_layrnorm")  # spelt so in checkpoints
        self.encoder = ClipEncoder(config, place)

    def forward(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """Normalised pixels [N, 3, S, S] -> [N, T, D], the class token first. Collective."""
        out_NTD: torch.Tensor = self.encoder(self.pre_layrnorm(self.embeddings(pixels_NCSS)))
        return out_NTD


def column(
    in_features: int, name: str, out_features: int, place: Placement, *, bias: bool
) -> ColumnParallelLinear:
    """A linear alone whose single output features are dealt to the ranks."""
    part = OutSlice(name=name, out_features=out_features, units=out_features)
    return ColumnParallelLinear(in_features, (part,), place, bias=bias)


def _norm(config: VisionConfig, place: Placement, name: str) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_eps, place, name=name)
