"""The operations of a step as pieces of work, each with the bytes it must move and its arithmetic.

Weights of several layers take turns, so they come from memory as in a step, not from a cache that a
loop over one matrix would keep warm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.timing import Work
from mstar_tp.bench.models import Shape
from mstar_tp.kernels import linear_weight
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.layers.activation import silu_and_mul
from mstar_tp.layers.attention.attention import (
    Attention,
    AttentionRow,
    ForwardContext,
    KVCache,
    build_attention_plan,
)
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.layers.rotary import RopeConfig, RotaryEmbedding

PAGE_SIZE = 16
MOST_WEIGHT_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True)
class KernelCase:
    """One line of the table.

    ``work`` runs the operation ``calls`` times; ``beside`` the same with other code. Bytes and
    operations are of one call.
    """

    op: str
    sizes: str
    rows: int
    adapters: int = 0
    num_bytes: int
    flops: int
    calls: int = 1
    work: Work
    beside: dict[str, Work] = field(default_factory=dict)


def copies_of(shape: Shape, num_bytes: int) -> int:
    """The number of layers' worth of something that take turns."""
    return max(1, min(shape.layers, MOST_WEIGHT_BYTES // max(num_bytes, 1)))


def gemm_cases(shape: Shape, rows: Sequence[int], device: torch.device) -> Iterator[KernelCase]:
    """Each fused linear as the server runs it, beside torch's, on plain and packed weights."""
    for name, (outputs, inputs) in shape.gemms().items():
        weight_bytes = outputs * inputs * shape.dtype.itemsize
        copies = copies_of(shape, 3 * weight_bytes)
        plain = [random(outputs, inputs, shape.dtype, device) for _ in range(copies)]
        packed = [LinearWeight(weight) for weight in plain]
        for weight in packed:
            weight.pack()
        onednn = (
            [linear_weight._pack(weight) for weight in plain]
            if linear_weight._onednn_packs(plain[0])
            else []
        )
        for count in rows:
            x = random(count, inputs, shape.dtype, device)
            case = KernelCase(
                op=f"gemm {name}",
                sizes=f"{outputs} x {inputs}",
                rows=count,
                num_bytes=weight_bytes + count * (inputs + outputs) * shape.dtype.itemsize,
                flops=2 * count * outputs * inputs,
                calls=copies,
                work=partial(_each, packed, x),
            )
            if packed[0].is_packed:
                case.beside["F.linear"] = partial(_linear_each, plain, x)
            if onednn:
                case.beside["oneDNN, packed"] = partial(_onednn_each, onednn, x)
            yield case


def _each(weights: Sequence[LinearWeight], x: torch.Tensor) -> None:
    for weight in weights:
        weight(x)


def _linear_each(weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


def _onednn_each(weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    for weight in weights:
        linear_weight._packed_linear(x, weight, None)


def attention_cases(
    shape: Shape, rows: Sequence[int], context: int, device: torch.device
) -> Iterator[KernelCase]:
    """Decoding rows with ``context`` tokens each, and a prompt of as many.

    Beside them runs torch's own attention on keys and values that lie side by side already.
    """
    for count in rows:
        decoding = [AttentionRow(1, context - 1, _pages(row, context)) for row in range(count)]
        yield _attention_case(shape, "attention decode", decoding, context, device)
    prompt = [AttentionRow(context, 0, _pages(0, context))]
    yield _attention_case(shape, "attention prompt", prompt, context, device)


def _pages(row: int, context: int) -> range:
    size = -(-context // PAGE_SIZE)
    return range(row * size, (row + 1) * size)


def _attention_case(
    shape: Shape, op: str, rows: Sequence[AttentionRow], context: int, device: torch.device
) -> KernelCase:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    tokens = sum(row.num_tokens for row in rows)
    kv_bytes = 2 * len(rows) * context * kv_heads * dim * shape.dtype.itemsize
    copies = copies_of(shape, kv_bytes)
    pages = len(rows) * (-(-context // PAGE_SIZE))
    caches = [
        KVCache.allocate(pages, PAGE_SIZE, kv_heads, dim, shape.dtype, device)
        for _ in range(copies)
    ]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    plan = build_attention_plan(rows, PAGE_SIZE, device)
    ctx = ForwardContext(attn=plan, kv=caches)
    layers = [Attention(at, heads, kv_heads, dim, dim**-0.5) for at in range(copies)]
    q = random(tokens, heads * dim, shape.dtype, device)
    k, v = (random(tokens, kv_heads * dim, shape.dtype, device) for _ in range(2))
    queries = rows[0].num_tokens
    seen = context if queries == 1 else (context + 1) / 2  # a causal prompt sees half
    q_BHND = q.view(len(rows), queries, heads, dim).transpose(1, 2)
    k_BKLD, v_BKLD = (
        torch.randn(len(rows), kv_heads, context, dim, device=device).to(shape.dtype)
        for _ in range(2)
    )

    def work() -> None:
        for layer in layers:
            layer(q, k, v, ctx)

    def beside() -> None:
        for _ in layers:
            torch.nn.functional.scaled_dot_product_attention(
                q_BHND, k_BKLD, v_BKLD, is_causal=queries > 1, enable_gqa=True
            )

    return KernelCase(
        op=op,
        sizes=f"{heads} / {kv_heads} heads of {dim}, {context} tokens",
        rows=tokens,
        num_bytes=kv_bytes + 2 * tokens * heads * dim * shape.dtype.itemsize,
        flops=int(4 * tokens * seen * heads * dim),
        calls=copies,
        work=work,
        beside={"sdpa, gathered": beside},
    )


def small_cases(shape: Shape, rows: Sequence[int], device: torch.device) -> Iterator[KernelCase]:
    """Norm with its residual, gated activation, rotation: beside the same in torch's operators."""
    size, hidden, inner = shape.dtype.itemsize, shape.hidden, shape.inner
    norm = RMSNorm(hidden, 1e-6, shape.dtype).to(device)
    rope = RotaryEmbedding(shape.head_dim, RopeConfig(), 4096)
    for count in rows:
        x, residual = (random(count, hidden, shape.dtype, device) for _ in range(2))
        weight = torch.ones(hidden, dtype=shape.dtype, device=device)
        yield KernelCase(
            op="norm with residual",
            sizes=str(hidden),
            rows=count,
            num_bytes=4 * count * hidden * size,
            flops=4 * count * hidden,
            work=partial(norm.forward_add, x, residual),
            beside={"torch": partial(_torch_norm, x, residual, weight)},
        )
        gate_up = random(count, 2 * inner, shape.dtype, device)
        yield KernelCase(
            op="silu and mul",
            sizes=str(inner),
            rows=count,
            num_bytes=3 * count * inner * size,
            flops=6 * count * inner,
            work=partial(silu_and_mul, gate_up),
            beside={"torch": partial(_torch_gate, gate_up)},
        )
        q = random(count, shape.heads * shape.head_dim, shape.dtype, device)
        k = random(count, shape.kv_heads * shape.head_dim, shape.dtype, device)
        angles = rope.lookup(torch.arange(count, device=device), shape.dtype)
        turned = (shape.heads + shape.kv_heads) * shape.head_dim
        yield KernelCase(
            op="rotation",
            sizes=f"{shape.heads} + {shape.kv_heads} heads of {shape.head_dim}",
            rows=count,
            num_bytes=2 * count * turned * size,
            flops=6 * count * turned,
            work=partial(
                rope.rotate,
                angles,
                q.view(count, shape.heads, shape.head_dim),
                k.view(count, shape.kv_heads, shape.head_dim),
            ),
        )


def _torch_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x + residual, (x.shape[-1],), weight, 1e-6)


def _torch_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small normal numbers [rows, columns]."""
    return torch.empty(rows, columns, device=device).normal_(0, 0.02).to(dtype)
