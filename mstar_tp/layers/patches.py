"""Patches of an image's pixels as the tokens of a vision tower.

Legend: N images, C channels, S pixels a side, K pixels a patch side, P patches an image, T tokens
an image (the class token and its patches), D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.layers.weights import Placement, WeightReader, join

CHANNELS = 3


class PatchConv(nn.Module):
    """A convolution whose kernel equals its stride, as one GEMM over patches; no bias.

    Pixels at the right and lower edges that fill no patch are left out. Whole on every rank: it is
    a small part of a tower, and dealt it would need a gather.
    """

    def __init__(self, hidden_size: int, patch_size: int, place: Placement, *, name: str) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.patch_size = patch_size
        self.place = place
        self.name = name
        self.weight: LinearWeight | None = None

    @property
    def kernel(self) -> tuple[int, int, int]:
        """(channels, height, width) of a patch."""
        return (CHANNELS, self.patch_size, self.patch_size)

    def load(self, reader: WeightReader, parent: str) -> None:
        shape = (self.hidden_size, *self.kernel)
        weight = torch.empty(shape, dtype=self.place.dtype)
        key = join(parent, f"{self.name}.weight")
        reader.read_rows(key, shape, range(self.hidden_size), weight)
        self.weight = LinearWeight(weight.flatten(1).to(self.place.device))

    def local(self, patches_RI: torch.Tensor) -> torch.Tensor:
        """Patches as rows [R, C*K*K] -> [R, D]."""
        assert self.weight is not None, f"{self.name} was never loaded"
        out: torch.Tensor = self.weight(patches_RI)
        return out

    def forward(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """[N, C, S, S] -> [N, P, D], patches row by row."""
        patches_RD = self.local(self.rows(pixels_NCSS))
        return patches_RD.view(len(pixels_NCSS), -1, self.hidden_size)

    def rows(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """[N, C, S, S] -> [N * P, C*K*K]."""
        side = self.patch_size
        windows = pixels_NCSS.unfold(2, side, side).unfold(3, side, side)  # [N, C, h, w, K, K]
        return windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, CHANNELS * side * side)


class ImageEmbeddings(nn.Module):
    """A class token and an image's patches, each with its position's embedding."""

    def __init__(self, hidden_size: int, patch_size: int, num_patches: int, place: Placement):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_tokens = num_patches + 1
        self.place = place
        self.patch_embedding = PatchConv(hidden_size, patch_size, place, name="patch_embedding")
        self.class_D: torch.Tensor | None = None
        self.positions_TD: torch.Tensor | None = None

    def load(self, reader: WeightReader, parent: str) -> None:
        here = join(parent, "embeddings")
        class_D = torch.empty(self.hidden_size, dtype=self.place.dtype)
        reader.read_rows(
            f"{here}.class_embedding", (self.hidden_size,), range(self.hidden_size), class_D
        )
        shape = (self.num_tokens, self.hidden_size)
        positions_TD = torch.empty(shape, dtype=self.place.dtype)
        reader.read_rows(
            f"{here}.position_embedding.weight", shape, range(self.num_tokens), positions_TD
        )
        self.class_D = class_D.to(self.place.device)
        self.positions_TD = positions_TD.to(self.place.device)

    def forward(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """[N, C, S, S] -> [N, T, D]."""
        assert self.class_D is not None and self.positions_TD is not None, "was never loaded"
        class_N1D = self.class_D.expand(len(pixels_NCSS), 1, -1)
        return torch.cat((class_N1D, self.patch_embedding(pixels_NCSS)), dim=1) + self.positions_TD


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU with its tanh approximation."""
    return F.gelu(x, approximate="tanh")
