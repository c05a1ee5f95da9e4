"""The linears of a layer's routed experts as pieces of work, beside a GEMM an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.kernel_cases import KernelCase
from mstar_tp.lora.device.expert_ops import grouped


def expert_cases(
    rows: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    hidden: int,
    inner: int,
    experts: int,
    choices: int,
) -> Iterator[KernelCase]:
    """Gate and up of a layer: sorting its tokens included, their choices at random."""
    weight = torch.empty(experts, 2 * inner, hidden, device=device).normal_(0, 0.02).to(dtype)
    for count in rows:
        chosen = torch.rand(count, experts).topk(choices).indices
        yield _case(weight, chosen.to(device), device, hidden)


def _case(
    weight: torch.Tensor, chosen: torch.Tensor, device: torch.device, hidden: int
) -> KernelCase:
    count, choices = chosen.shape
    x = torch.empty(count, hidden, device=device).normal_().to(weight.dtype)
    flat = chosen.flatten().tolist()
    rows_of = {
        expert: torch.tensor([at // choices for at, e in enumerate(flat) if e == expert])
        for expert in sorted(set(flat))
    }
    places = {expert: rows.to(device) for expert, rows in rows_of.items()}

    def ours() -> None:
        pairs = grouped(chosen, len(weight))
        torch.ops.mstar_moe.linear(x, weight, pairs.order, pairs.tiles, choices, pairs.block_rows)

    def each() -> None:
        for expert, rows in places.items():
            torch.mm(x[rows], weight[expert].t())

    width = weight.shape[1]
    moved = len(places) * width * hidden + x.numel() + count * choices * width
    return KernelCase(
        op="experts gate_up",
        sizes=f"{len(weight)} x {width} x {hidden}, {choices} each",
        rows=count,
        num_bytes=moved * weight.dtype.itemsize,
        flops=2 * count * choices * width * hidden,
        work=ours,
        beside={"torch, expert by expert": each},
    )
