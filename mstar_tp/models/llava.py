"""LLaVA: a CLIP tower and a projector of two layers, whose output stands in a Llama's prompt.

Legend: N images, S pixels a side, P tokens an image gives, V the tower's hidden size, D the
decoder's.
"""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.common.module_names import CheckpointRules
from mstar_tp.layers.linear import RowParallelLinear
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.stage_rows import RowGrouping
from mstar_tp.models.blocks import CausalLM, LoraStage, PreNormDecoder
from mstar_tp.models.clip import ACTIVATIONS, ClipTower, column
from mstar_tp.models.config.config_vision import VisionConfig
from mstar_tp.models.config.families import ModelConfig

RULES = CheckpointRules(
    (
        ("model.vision_tower", "vision_tower"),
        ("model.vision_tower.vision_model", "vision_tower"),
        ("vision_tower.vision_model", "vision_tower"),
        ("model.multi_modal_projector", "multi_modal_projector"),
        ("language_model.model", "model"),
        ("language_model.lm_head", "lm_head"),
        ("model.language_model", "model"),
    )
)
"""The names that checkpoints of several years have for the model's parts -> its own."""
MODULES = CheckpointRules(
    (
        ("vision_tower", "model.vision_tower"),
        ("multi_modal_projector", "model.multi_modal_projector"),
        ("model", "model.language_model"),
    )
)
"""The names that transformers, and so PEFT, has for the model's own."""


class Projector(nn.Module):
    """linear_2(act(linear_1(x))), from the tower's hidden size to the decoder's."""

    def __init__(self, config: VisionConfig, hidden_size: int, place: Placement) -> None:
        super().__init__()
        bias = config.projector_bias
        self.linear_1 = column(config.hidden_size, "linear_1", hidden_size, place, bias=bias)
        self.linear_2 = RowParallelLinear(hidden_size, "linear_2", hidden_size, place, bias=bias)
        self._activate = ACTIVATIONS[config.projector_activation]

    def forward(self, x_RV: torch.Tensor) -> torch.Tensor:
        """[R, V] -> [R, D]. Collective: linear_2's all_reduce."""
        out: torch.Tensor = self.linear_2(self._activate(self.linear_1(x_RV)))
        return out


class LlavaForConditionalGeneration(CausalLM):
    """A Llama with a second stage: tower and projector, which run before it."""

    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position))
        assert config.vision is not None, "a LLaVA's config has a vision half"
        self.vision_config = config.vision
        self.vision_tower = ClipTower(config.vision, place)
        self.multi_modal_projector = Projector(config.vision, config.hidden_size, place)
        self._normalised = _normalised(config.vision).to(place.device, place.dtype)

    def lora_stages(self) -> tuple[LoraStage, ...]:
        vision = {
            "vision_tower": self.vision_tower,
            "multi_modal_projector": self.multi_modal_projector,
        }
        decoder = {"model": self.model, "lm_head": self.lm_head}
        # Patches and the projector see an image without its class token.
        rows = {r"vision_tower\.embeddings\.patch_embedding": RowGrouping(skip=1)}
        if not self.vision_config.keeps_class:
            rows[r"multi_modal_projector\..*"] = RowGrouping(skip=1)
        tokens = self.vision_config.num_patches + 1
        return (
            LoraStage("vision", nn.ModuleDict(vision), rows, tokens),
            LoraStage("language", nn.ModuleDict(decoder), {}, None),
        )

    def encode_images(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """uint8 pixels [N, 3, S, S] -> what stands for each image in a prompt, [N, P, D].

        Collective on the model's group: every rank calls it with the same pixels.
        """
        channels = torch.arange(3, device=pixels_NCSS.device).view(3, 1, 1)
        seen_NTV = self.vision_tower(self._normalised[channels, pixels_NCSS.long()])
        if not self.vision_config.keeps_class:
            seen_NTV = seen_NTV[:, 1:]
        num_images, num_tokens, _ = seen_NTV.shape
        out_RD: torch.Tensor = self.multi_modal_projector(seen_NTV.flatten(0, 1))
        return out_RD.view(num_images, num_tokens, -1)


def _normalised(config: VisionConfig) -> torch.Tensor:
    """The normalised value of each of a channel's 256 values: float32 [3, 256].

    Scaled in float64, rounded, then normalised in float32, as transformers' image processor does.
    """
    pixels = config.pixels
    scaled = (torch.arange(256, dtype=torch.float64) * pixels.scale).float()
    mean, std = (torch.tensor(three).unsqueeze(1) for three in (pixels.mean, pixels.std))
    return (scaled - mean) / std
