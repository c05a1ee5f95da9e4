"""Other projects' ways to add adapters' deltas, where they can be imported.

They are only called, never copied.

    peft          lora.Linear of a mixed batch, which holds its base's product too; on CPUs, as it
                  waits for the device and no graph can hold it
    vllm          on CPUs its torch operators (bgmv), on CUDA its Triton kernels
    sglang        its Triton kernels, on CUDA

A peer whose functions have other arguments in the version that is here is left out, with a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from benchmarks.timing import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWork:
    """One linear's delta: ``slots`` has each row's adapter, from 1, in order."""

    slots: tuple[int, ...]
    adapters: int
    rank: int
    in_features: int
    out_sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    copies: int

    def random(self, *shape: int) -> torch.Tensor:
        numbers = torch.empty(shape, device=self.device).normal_(0, 0.02)
        return numbers.to(self.dtype)


def peers_of(delta: DeltaWork, notes: list[str]) -> dict[str, Work]:
    """Name -> the same delta, ``copies`` times, of every peer that is here and answers."""
    makers: dict[str, Callable[[DeltaWork], Work]]
    if delta.device.type == "cuda":
        makers = {"vllm": _vllm_triton, "sglang": _sglang}
    else:
        makers = {"peft": _peft, "vllm": _vllm_torch}
    found = {}
    for name, make in makers.items():
        try:
            work = make(delta)
            work()
        except ImportError:
            continue
        except Exception as error:  # another version's arguments: measured without this peer
            note = f"{name} is left out: {type(error).__name__}: {error}"[:300]
            if note not in notes:
                notes.append(note)
            continue
        found[name] = work
    return found


def _peft(delta: DeltaWork) -> Work:
    """A whole mixed-batch linear a slice, its base's product included: PEFT has no delta alone."""
    linear = import_module("peft.tuners.lora").Linear
    config = import_module("peft").LoraConfig(r=delta.rank, lora_alpha=delta.rank)
    names = [str(slot) for slot in delta.slots]
    layers = []
    for _ in range(delta.copies):
        for size in delta.out_sizes:
            base = torch.nn.Linear(delta.in_features, size, bias=False)
            base.to(delta.device, delta.dtype)
            layer = linear(base, "1", config=config, r=delta.rank, lora_alpha=delta.rank)
            for slot in range(2, delta.adapters + 1):
                layer.update_layer(str(slot), delta.rank, delta.rank, config=config)
            layer.to(delta.device, delta.dtype).eval()
            layers.append(layer)
    x = delta.random(len(names), 1, delta.in_features)

    def work() -> None:
        with torch.inference_mode():
            for layer in layers:
                layer(x, adapter_names=names)

    return work


def _vllm_torch(delta: DeltaWork) -> Work:
    ops = import_module("vllm.lora.ops.torch_ops")
    index = torch.tensor(delta.slots) - 1
    rows = len(delta.slots)
    x = delta.random(rows, delta.in_features)
    y = delta.random(rows, sum(delta.out_sizes))
    parts = [
        [
            (
                delta.random(delta.adapters, 1, delta.rank, delta.in_features),
                delta.random(delta.adapters, 1, size, delta.rank),
            )
            for size in delta.out_sizes
        ]
        for _ in range(delta.copies)
    ]

    def work() -> None:
        for layer in parts:
            first = 0
            for (a, b), size in zip(layer, delta.out_sizes, strict=True):
                h = torch.zeros(rows, delta.rank)
                ops.bgmv_shrink(x, a, h, index, 1.0)
                ops.bgmv_expand_slice(h, b, y, index, first, size, add_inputs=True)
                first += size

    return work


def _vllm_triton(delta: DeltaWork) -> Work:
    ops = import_module("vllm.lora.ops.triton_ops")
    rows = len(delta.slots)
    mapping = torch.tensor(delta.slots, dtype=torch.int32, device=delta.device) - 1
    meta = ops.LoRAKernelMeta.make(delta.adapters, rows, delta.device)
    meta.prepare_tensors(mapping)
    try:
        about = meta.meta_args(rows, False)
    except TypeError:
        about = meta.meta_args(rows)
    x = delta.random(rows, delta.in_features)
    y = delta.random(rows, sum(delta.out_sizes))
    h = torch.zeros(
        len(delta.out_sizes), rows, delta.rank, dtype=torch.float32, device=delta.device
    )
    parts = [
        (
            [delta.random(delta.adapters, delta.rank, delta.in_features) for _ in delta.out_sizes],
            [delta.random(delta.adapters, size, delta.rank) for size in delta.out_sizes],
        )
        for _ in range(delta.copies)
    ]

    def work() -> None:
        for a, b in parts:
            ops.lora_shrink(x, a, h, *about, 1.0)
            ops.lora_expand(h, b, y, *about, offset_start=0, add_inputs=True)

    return work


def _sglang(delta: DeltaWork) -> Work:
    """One segment an adapter, slices as one linear: its fused kernels differ by name only."""
    ops = import_module("sglang.srt.lora.triton_ops")
    info = import_module("sglang.srt.lora.utils").LoRABatchInfo
    counts = [delta.slots.count(slot) for slot in range(1, delta.adapters + 1)]
    bounds = [sum(counts[:at]) for at in range(len(counts) + 1)]

    def numbers(values: list[int] | list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=delta.device)

    batch = info(
        use_cuda_graph=False,
        bs=delta.adapters,
        num_segments=delta.adapters,
        seg_indptr=numbers(bounds, torch.int32),
        weight_indices=numbers(list(range(delta.adapters)), torch.int32),
        lora_ranks=numbers([delta.rank] * delta.adapters, torch.int32),
        scalings=numbers([1.0] * delta.adapters, torch.float32),
        max_len=max(counts),
        seg_lens=numbers(counts, torch.int32),
        permutation=None,
    )
    x = delta.random(len(delta.slots), delta.in_features)
    y = delta.random(len(delta.slots), sum(delta.out_sizes))
    parts = [
        (
            delta.random(delta.adapters, delta.rank, delta.in_features),
            delta.random(delta.adapters, sum(delta.out_sizes), delta.rank),
        )
        for _ in range(delta.copies)
    ]

    def work() -> None:
        for a, b in parts:
            h = ops.sgemm_lora_a_fwd(x, a, batch)
            ops.sgemm_lora_b_fwd(h, b, batch, y)

    return work
