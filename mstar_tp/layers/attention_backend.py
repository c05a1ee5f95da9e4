"""Which code attends: chosen once, at start, from the configuration, the device and the model."""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.errors import ConfigError
from mstar_tp.layers.attention import Attention, AttentionPlanner, TorchPlanner
from mstar_tp.layers.paged_plan import PagedPlanner
from mstar_tp.lora.ops import interprets, triton_is_here


def attention_planner(
    backend: str,
    model: nn.Module,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
    *,
    invariant: bool = False,
) -> AttentionPlanner:
    """``backend``: auto, triton or torch. auto takes Triton on CUDA devices, where it is installed,
    and torch with our own kernels on CPUs. ``invariant``: a row's bits do not depend on the rows
    beside it.

    Raises:
        ConfigError: this machine cannot do what is asked for.
    """
    if backend == "torch" or (
        backend == "auto" and not (device.type == "cuda" and triton_is_here())
    ):
        return TorchPlanner(page_size, device)
    if device.type != "cuda" and not interprets():
        raise ConfigError(
            f"--attention-backend {backend} needs a CUDA device and this rank computes on "
            f"{device.type}: use auto or torch"
        )
    if not triton_is_here():
        raise ConfigError(
            f"--attention-backend {backend} needs Triton, which is not installed: use auto or torch"
        )
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return PagedPlanner(layers[0].shape, dtype, page_size, device, invariant=invariant)
