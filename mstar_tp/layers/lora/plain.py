"""LoRA twins of modules that no rank splits: torch's own linear, and patch convolutions.

Bound as the parallel linears are (see ``lora_linear``). No rank splits them: every rank holds the
whole weight and adds the whole delta, so the outputs stay equal.

Legend: N images, C channels, O output features, R rows (output positions), I = C times the kernel.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from mstar_tp.layers.patches import PatchConv
from mstar_tp.lora.device.deltas import LoraLayerDelta


class LinearWithLora(nn.Linear):
    """Inputs of any number of dims: all but the last are rows, in their order."""

    lora_delta: LoraLayerDelta

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        y = super().forward(input)
        if self.lora_delta.is_idle:
            return y
        x_RI = input.reshape(-1, self.in_features)
        return self.lora_delta(y.reshape(-1, self.out_features), x_RI).view(y.shape)


class PatchConvWithLora(PatchConv):
    """One row a patch, as the base's GEMM has them."""

    lora_delta: LoraLayerDelta

    def local(self, patches_RI: torch.Tensor) -> torch.Tensor:
        return self.lora_delta(super().local(patches_RI), patches_RI)


class PatchConv2dWithLora(nn.Conv2d):
    """A convolution whose delta covers every output position, image by image, row by row.

    What is left of the input past the last whole patch is in no position, so it gets no row.
    """

    lora_delta: LoraLayerDelta

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        return _with_patch_delta(super().forward(input), input, self.kernel_size, self.lora_delta)


class PatchConv3dWithLora(nn.Conv3d):
    """A ``PatchConv2dWithLora`` of clips: its patches lie in time and space."""

    lora_delta: LoraLayerDelta

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        return _with_patch_delta(super().forward(input), input, self.kernel_size, self.lora_delta)


def patch_obstacle(conv: nn.Conv2d | nn.Conv3d) -> str | None:
    """The reason why the convolution is none over patches side by side, or None.

    Only such a one is a linear of its patches.
    """
    if tuple(conv.stride) != tuple(conv.kernel_size):
        return (
            f"it is a convolution of stride {tuple(conv.stride)} and kernel "
            f"{tuple(conv.kernel_size)}: only patches side by side are served"
        )
    padded = conv.padding != "valid" and any(map(bool, conv.padding))
    if padded or any(step != 1 for step in conv.dilation) or conv.groups != 1:
        return "it is a convolution with padding, dilation or groups"
    return None


def patches_of(x: torch.Tensor, kernel: tuple[int, ...]) -> torch.Tensor:
    """One row [R, I] for each whole patch of ``x``, [N, C, *size] or [C, *size].

    The rows are in the order of a convolution's output positions.
    """
    dims = len(kernel)
    if x.dim() == dims + 1:
        x = x.unsqueeze(0)
    counts = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, k) in enumerate(zip(counts, kernel, strict=True), start=2):
        x = x.narrow(dim, 0, count * k)
    split = [part for pair in zip(counts, kernel, strict=True) for part in pair]
    x = x.reshape(*x.shape[:2], *split)
    at, within = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    rows = x.permute(0, *at, 1, *within)
    return rows.reshape(-1, x.shape[1] * math.prod(kernel))


def _with_patch_delta(
    y: torch.Tensor, x: torch.Tensor, kernel: tuple[int, ...], delta: LoraLayerDelta
) -> torch.Tensor:
    """``y`` plus its patches' deltas; the same shape."""
    if delta.is_idle:
        return y
    channel = y.dim() - len(kernel) - 1
    last = y.movedim(channel, -1)
    y_RO = last.reshape(-1, last.shape[-1]).contiguous()
    return delta(y_RO, patches_of(x, kernel)).view(last.shape).movedim(-1, channel)
