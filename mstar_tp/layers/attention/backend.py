"""The choice of the code that attends, made at start from configuration, device and model."""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.common.errors import ConfigError
from mstar_tp.layers.attention.attention import Attention, AttentionPlanner, TorchPlanner
from mstar_tp.layers.attention.flashinfer_plan import FlashInferPlanner, load_flashinfer
from mstar_tp.layers.attention.paged_plan import PagedPlanner
from mstar_tp.lora.device.ops import interprets, triton_is_here


def attention_planner(
    backend: str,
    model: nn.Module,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
    *,
    invariant: bool = False,
) -> AttentionPlanner:
    """The planner of ``backend``: auto, triton, flashinfer or torch.

    auto takes Triton on CUDA devices, where it is installed, and torch with our own kernels on
    CPUs. ``invariant``: a row's bits do not depend on the rows beside it, on a CUDA device.

    Raises:
        ConfigError: this machine cannot do what is asked for.
    """
    if backend == "operators":  # those that CUDA has kernels for, where nothing else is asked
        shape = next(m.shape for m in model.modules() if isinstance(m, Attention))
        return PagedPlanner(shape, dtype, page_size, device, invariant=invariant)
    on_cuda = device.type == "cuda"
    if backend == "auto":
        backend = "triton" if on_cuda and triton_is_here() else "torch"
    if invariant and on_cuda and backend != "triton":
        raise ConfigError(
            f"--batch-invariant needs the attention backend triton and this is {backend}: "
            "install Triton, and use auto or triton"
        )
    if backend == "torch":
        return TorchPlanner(page_size, device)
    asked = f"--attention-backend {backend}"
    if not on_cuda and not interprets():
        raise ConfigError(
            f"{asked} needs a CUDA device and this rank computes on {device.type}: "
            "use auto or torch"
        )
    if not triton_is_here():
        raise ConfigError(f"{asked} needs Triton, which is not installed: use auto or torch")
    shape = next(m.shape for m in model.modules() if isinstance(m, Attention))
    if backend == "flashinfer":
        library = load_flashinfer(shape, dtype)
        return FlashInferPlanner(library, shape, dtype, page_size, device)
    return PagedPlanner(shape, dtype, page_size, device, invariant=invariant)
