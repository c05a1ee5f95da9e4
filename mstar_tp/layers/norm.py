"""Norms: root-mean-square, with the rounding order of the model family it serves, and layer norm.

Legend: T tokens, D normed size (hidden size, or a head's).
"""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.weights import Placement, WeightReader, join


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim, float32 inside.

    Llama, Mistral and Qwen round to x's dtype first and then multiply by the weight in it; Gemma
    (``unit_offset``) multiplies by ``1 + weight`` in float32 and rounds once. ``name`` is the
    module's name under its parent in the checkpoint; only ``load`` reads it.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        unit_offset: bool = False,
        *,
        name: str = "norm",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.unit_offset = unit_offset
        self.name = name
        start = torch.zeros if unit_offset else torch.ones
        self.set_weight(start(size, dtype=dtype, device=device))

    def set_weight(self, weight_D: torch.Tensor) -> None:
        """Take the checkpoint's values [D] (for Gemma: without the one that is added)."""
        assert weight_D.shape == (self.size,), f"wanted [{self.size}], got {tuple(weight_D.shape)}"
        self.weight = weight_D
        self._shape = [self.size]
        self._scale = self._scale_of(weight_D)
        self._kernels = cpu_kernels(weight_D.device, weight_D.dtype)

    def load(self, reader: WeightReader, parent: str) -> None:
        """Read ``parent.name.weight``, whole on every rank.

        Raises:
            CheckpointError: the key is absent or misshapen.
        """
        weight_D = torch.empty(self.size, dtype=self.weight.dtype)
        key = join(join(parent, self.name), "weight")
        reader.read_rows(key, (self.size,), range(self.size), weight_D)
        self.set_weight(weight_D.to(self.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] or [T, H, D] -> the same, same dtype."""
        return self._normed(x, self._scale)

    def forward_with(self, x: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """``forward`` as it would be with another weight."""
        return self._normed(x, self._scale_of(weight_D))

    def _scale_of(self, weight_D: torch.Tensor) -> torch.Tensor:
        # Gemma's product is in float32 whatever the model's dtype: add the one here, not each call.
        return 1.0 + weight_D.float() if self.unit_offset else weight_D

    def _normed(self, x: torch.Tensor, scale_D: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x, scale_D, self.eps)
        if x.dtype is torch.float32:
            return torch.rms_norm(x, self._shape, scale_D, self.eps)
        if self.unit_offset:
            return torch.rms_norm(x.float(), self._shape, scale_D, self.eps).to(x.dtype)
        # Without a weight the op rounds once, to x's dtype; with one it would round after it.
        return torch.rms_norm(x, self._shape, None, self.eps).mul_(scale_D)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual). The sum is written into ``residual``."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self._scale, self.eps, residual), residual
        residual = residual.add_(x)
        return self._normed(residual, self._scale), residual


class LayerNorm(nn.Module):
    """The norm ``(x - mean) / deviation * weight + bias`` over the last dim.

    ``name`` is the module's name under its parent in the checkpoint.
    """

    def __init__(self, size: int, eps: float, place: Placement, *, name: str) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.place = place
        self.name = name
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def load(self, reader: WeightReader, parent: str) -> None:
        """Read weight and bias, whole on every rank.

        Raises:
            CheckpointError: a key is absent or misshapen.
        """
        self.weight, self.bias = (
            self._read(reader, join(join(parent, self.name), part)) for part in ("weight", "bias")
        )

    def _read(self, reader: WeightReader, key: str) -> torch.Tensor:
        value_D = torch.empty(self.size, dtype=self.place.dtype)
        reader.read_rows(key, (self.size,), range(self.size), value_D)
        return value_D.to(self.place.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> the same, same dtype."""
        return torch.layer_norm(x, [self.size], self.weight, self.bias, self.eps)
