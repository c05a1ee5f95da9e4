"""Time the layers alone, without weights from disk: GEMMs plain against packed, and whole steps.

    python scripts/bench_layers.py [--size tiny|small|all] [--threads N] [--repeats N]

Prints markdown tables. Plain and packed are timed in turns within one loop and medians reported, so
a neighbour's load falls on both. A GEMM's weights are a whole model's, so they come from memory as
in a step, not from a cache that a loop over one matrix would keep warm. "of memory" is the weights'
bytes over the time, against what a plain read of a large buffer reaches in the same run; weights
that fit the cache pass 100 %. On a machine with neighbours set OMP_WAIT_POLICY=passive: threads
that spin for one another lose whole time slices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mstar_tp.layers.activation import silu_and_mul
from mstar_tp.layers.attention import (
    Attention,
    AttentionRow,
    ForwardContext,
    KVCache,
    build_attention_plan,
)
from mstar_tp.layers.gemm import LinearWeight
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.layers.rotary import RopeConfig, RotaryEmbedding, RotaryTables

CPU = torch.device("cpu")
PAGE_SIZE = 16
GEMM_ROWS = (1, 8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One model's layers: the shapes of its four GEMMs follow."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def gemms(self) -> dict[str, tuple[int, int]]:
        """Name -> (out, in)."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SIZES = {
    "tiny": Size(
        hidden=256,
        inner=688,
        layers=4,
        heads=8,
        kv_heads=4,
        head_dim=32,
        dtype=torch.float32,
    ),
    "small": Size(
        hidden=896,
        inner=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
    ),
}


class Layer(nn.Module):
    """A pre-norm decoder layer on one rank, of this project's layers and no collective."""

    def __init__(self, size: Size, index: int, packed: bool) -> None:
        super().__init__()
        self.size = size
        self.qkv, self.o, self.gate_up, self.down = (
            _weight(shape, size.dtype, packed) for shape in size.gemms().values()
        )
        heads = (size.heads, size.kv_heads, size.head_dim)
        self.attn = Attention(index, *heads, size.head_dim**-0.5)
        self.rope = RotaryEmbedding(size.head_dim, RopeConfig(), 2048)
        self.norms = [RMSNorm(size.hidden, 1e-6, size.dtype) for _ in range(2)]

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        angles: RotaryTables,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) [T, hidden] -> (x, residual)."""
        size, (tokens, _) = self.size, x.shape
        x, residual = self.norms[0].forward_add(x, residual)
        widths = [n * size.head_dim for n in (size.heads, size.kv_heads, size.kv_heads)]
        q, k, v = torch.split_with_sizes(self.qkv(x), widths, -1)
        q, k = self.rope.rotate(
            angles,
            q.view(tokens, size.heads, size.head_dim),
            k.view(tokens, size.kv_heads, size.head_dim),
        )
        x = self.o(self.attn(q.flatten(1), k.flatten(1), v, ctx))
        x, residual = self.norms[1].forward_add(x, residual)
        return self.down(silu_and_mul(self.gate_up(x))), residual


class Stack:
    """All layers of a size, with caches for 16 requests of up to 1024 tokens."""

    def __init__(self, size: Size, packed: bool) -> None:
        self.size = size
        self.layers = [Layer(size, i, packed) for i in range(size.layers)]
        heads = (size.kv_heads, size.head_dim)
        self.kv = [
            KVCache.allocate(16 * 64, PAGE_SIZE, *heads, size.dtype, CPU)
            for _ in range(size.layers)
        ]
        for cache in self.kv:
            cache.k.normal_()
            cache.v.normal_()

    def step(self, rows: list[AttentionRow]) -> None:
        """Plan and run one step: what the engine does around embedding, head and sampling."""
        spans = [torch.arange(r.context, r.context + r.num_tokens) for r in rows]
        ctx = ForwardContext(build_attention_plan(rows, PAGE_SIZE, CPU), self.kv)
        angles = self.layers[0].rope.lookup(torch.cat(spans), self.size.dtype)
        x = torch.ones(ctx.attn.num_tokens, self.size.hidden, dtype=self.size.dtype)
        residual = x.clone()
        for layer in self.layers:
            x, residual = layer(x, residual, angles, ctx)


def _weight(shape: tuple[int, int], dtype: torch.dtype, packed: bool) -> LinearWeight:
    weight = LinearWeight(torch.empty(shape, dtype=dtype).normal_(0, 0.02))
    if packed:
        weight.pack()
    return weight


def time_in_turns(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turns."""
    for run in work.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def memory_bytes_per_s() -> float:
    """What one pass over a buffer larger than any cache reads a second, best of ten."""
    buffer = torch.ones(64 << 20, dtype=torch.float32)
    best = min(time_in_turns({"read": buffer.sum}, 1)["read"] for _ in range(10))
    return buffer.numel() * buffer.element_size() / best


def multiply_all(weights: list[LinearWeight], x: torch.Tensor) -> None:
    for weight in weights:
        weight(x)


def bench_gemms(size: Size, bandwidth: float, repeats: int) -> None:
    print("| GEMM | out x in | rows | plain ms | packed ms | plain / packed | of memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    totals: dict[int, list[float]] = {rows: [0.0, 0.0] for rows in GEMM_ROWS}
    for name, shape in size.gemms().items():
        plain, packed = (
            [_weight(shape, size.dtype, p) for _ in range(size.layers)] for p in (False, True)
        )
        weight_bytes = shape[0] * shape[1] * size.dtype.itemsize * size.layers
        for rows in GEMM_ROWS:
            x = torch.randn(rows, shape[1]).to(size.dtype)
            work: dict[str, Callable[[], object]] = {
                "plain": partial(multiply_all, plain, x),
                "packed": partial(multiply_all, packed, x),
            }
            taken = time_in_turns(work, 3 if rows > 64 else repeats)
            totals[rows][0] += taken["plain"]
            totals[rows][1] += taken["packed"]
            _gemm_line(name, f"{shape[0]} x {shape[1]}", rows, taken, weight_bytes / bandwidth)
    for rows, (plain_s, packed_s) in totals.items():
        all_bytes = sum(o * i for o, i in size.gemms().values()) * size.dtype.itemsize * size.layers
        taken = {"plain": plain_s, "packed": packed_s}
        _gemm_line("all", "", rows, taken, all_bytes / bandwidth)


def _gemm_line(name: str, shape: str, rows: int, taken: dict[str, float], floor_s: float) -> None:
    plain, packed = taken["plain"], taken["packed"]
    print(
        f"| {name} | {shape} | {rows} | {plain * 1e3:.2f} | {packed * 1e3:.2f} | "
        f"{plain / packed:.2f} | {floor_s / packed:.0%} |",
        flush=True,
    )


def bench_steps(size: Size, repeats: int) -> None:
    def pages(request: int) -> range:
        return range(request * 64, (request + 1) * 64)

    steps = {
        "decode, 1 row at 100 tokens": [AttentionRow(1, 100, pages(0))],
        "decode, 8 rows at 96 to 103": [AttentionRow(1, 96 + i, pages(i)) for i in range(8)],
        "decode, 16 rows at 500": [AttentionRow(1, 500 + i, pages(i)) for i in range(16)],
        "prefill, 8 rows of 64": [AttentionRow(64, 0, pages(i)) for i in range(8)],
        "prefill, 1 row of 512": [AttentionRow(512, 0, pages(0))],
        "7 decoding, a chunk of 128 after 128": [
            *(AttentionRow(1, 100 + i, pages(i)) for i in range(7)),
            AttentionRow(128, 128, pages(8)),
        ],
    }
    plain, packed = Stack(size, packed=False), Stack(size, packed=True)
    print("| one step, all layers | plain ms | packed ms | plain / packed |")
    print("| --- | --- | --- | --- |")
    for name, rows in steps.items():
        work: dict[str, Callable[[], object]] = {
            "plain": partial(plain.step, rows),
            "packed": partial(packed.step, rows),
        }
        taken = time_in_turns(work, 3 if "prefill" in name else repeats)
        ratio = taken["plain"] / taken["packed"]
        print(
            f"| {name} | {taken['plain'] * 1e3:.2f} | {taken['packed'] * 1e3:.2f} | {ratio:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the layers alone.")
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bandwidth = memory_bytes_per_s()
    print(
        f"torch {torch.__version__}, {args.threads} threads, memory read {bandwidth / 1e9:.1f} GB/s"
    )
    for name in SIZES if args.size == "all" else [args.size]:
        print(f"\n{name} ({SIZES[name].layers} layers, {SIZES[name].dtype})\n", flush=True)
        with torch.inference_mode():
            bench_gemms(SIZES[name], bandwidth, args.repeats)
            print(flush=True)
            bench_steps(SIZES[name], args.repeats)


if __name__ == "__main__":
    main()
