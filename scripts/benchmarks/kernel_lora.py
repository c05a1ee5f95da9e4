"""The deltas of adapters as pieces of work, beside peers' ways on the same rows and ranks.

Rows take the adapters in turn, a run of rows each; every adapter has weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from support.delta_cases import DeltaCase, DeltaShape, rows_by_slot, tiled

from benchmarks.kernel_cases import KernelCase, copies_of
from benchmarks.kernel_peers import DeltaWork, peers_of
from mstar_tp.bench.models import Shape
from mstar_tp.lora.device.slot_weights import SlotWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec, LoraTarget
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.wire.values import AdapterKey


def delta_cases(
    shape: Shape,
    rows: Sequence[int],
    adapters: Sequence[int],
    rank: int,
    device: torch.device,
    notes: list[str],
) -> Iterator[KernelCase]:
    """Each fused linear's delta as the server adds it. ``notes`` takes why a peer is left out."""
    most = max(adapters)
    if not most:
        return
    size = shape.weight_bytes // shape.layers // shape.hidden * rank * most
    layers = copies_of(shape, size)
    spec = _spec(shape, layers, most, rank)
    weights = SlotWeights(spec, rank=0, world_size=1, device=device, dtype=shape.dtype)
    weights.install([(slot, _adapter(spec, shape.dtype, slot)) for slot in range(1, most + 1)])
    for target in spec.targets:
        for count in rows:
            for live in adapters:
                if 0 < live <= count:
                    delta = _delta_of(shape, target, count, live, rank, layers, device)
                    yield _delta_case(delta, weights, target, notes)


def _delta_of(
    shape: Shape,
    target: LoraTarget,
    rows: int,
    live: int,
    rank: int,
    layers: int,
    device: torch.device,
) -> DeltaWork:
    return DeltaWork(
        slots=tuple(sorted(1 + row % live for row in range(rows))),
        adapters=live,
        rank=rank,
        in_features=target.in_features,
        out_sizes=tuple(part.out_features for part in target.out_slices),
        dtype=shape.dtype,
        device=device,
        copies=layers,
    )


def _delta_case(
    delta: DeltaWork, weights: SlotWeights, target: LoraTarget, notes: list[str]
) -> KernelCase:
    rows, outputs = len(delta.slots), target.out_features
    counts = [delta.slots.count(slot) for slot in range(1, delta.adapters + 1)]
    x, y = delta.random(rows, target.in_features), delta.random(rows, outputs)
    plan = weights.plan(list(range(1, delta.adapters + 1)), counts)
    parts = [weights.layer(target.name, layer) for layer in range(delta.copies)]

    def work() -> None:
        for part in parts:
            part.add(y, x, plan)

    inputs = len(target.out_slices) * target.in_features
    factors = delta.adapters * delta.rank * (inputs + outputs)
    return KernelCase(
        op=f"lora {target.name.rpartition('.')[2].removesuffix('_proj')}",
        sizes=f"{outputs} x {target.in_features}, rank {delta.rank}",
        rows=rows,
        adapters=delta.adapters,
        num_bytes=(factors + x.numel() + 2 * y.numel()) * delta.dtype.itemsize,
        flops=2 * rows * delta.rank * (inputs + outputs),
        calls=delta.copies,
        work=work,
        beside=peers_of(delta, notes),
    )


def operator_cases(
    shape: Shape, rows: Sequence[int], adapters: Sequence[int], rank: int, device: torch.device
) -> Iterator[KernelCase]:
    """The operators of ``lora.ops`` one by one, on a square linear of the hidden size."""
    for count in rows:
        for live in adapters:
            if 0 < live <= count:
                yield from _operators(shape, count, live, rank, device)


def _operators(
    shape: Shape, rows: int, live: int, rank: int, device: torch.device
) -> Iterator[KernelCase]:
    hidden = shape.hidden
    sizes = DeltaShape(
        in_features=hidden,
        out_sizes=(hidden,),
        max_rank=rank,
        ranks=(rank,) * live,
        dtype=shape.dtype,
    )
    case = DeltaCase(sizes, device, 0)
    slots = sorted(1 + row % live for row in range(rows))
    tiles = tiled(slots, device)
    assert tiles is not None
    x, y = case.rows(rows)
    tables = (tiles.order_R, tiles.tiles_N3, case.ranks)
    ops = torch.ops.mstar_lora
    h = ops.shrink(x, case.a, *tables, rank, tiles.block_rows, 1)

    def torch_way() -> None:
        for slot, places in rows_by_slot(slots).items():
            part = slice(places[0], places[-1] + 1)
            y[part].addmm_(x[part] @ case.a[slot - 1].t(), case.b[slot - 1])

    calls = {
        "shrink": partial(ops.shrink, x, case.a, *tables, rank, tiles.block_rows, 1),
        "expand": partial(ops.expand, y, h, case.b, *tables, case.blocks, tiles.block_rows),
        "apply": partial(
            ops.apply, y, x, case.a, case.b, *tables, case.blocks, tiles.block_rows, False
        ),
    }
    between = rows * rank * 4
    moved = {
        "shrink": case.a.nbytes + x.nbytes + between,
        "expand": case.b.nbytes + 2 * y.nbytes + between,
        "apply": case.a.nbytes + case.b.nbytes + x.nbytes + 2 * y.nbytes,
    }
    for name, call in calls.items():
        yield KernelCase(
            op=f"operator {name}",
            sizes=f"{hidden} x {hidden}, rank {rank}",
            rows=rows,
            adapters=live,
            num_bytes=moved[name],
            flops=2 * rows * rank * hidden * (2 if name == "apply" else 1),
            work=call,
            beside={"torch, slot by slot": torch_way} if name == "apply" else {},
        )


def _spec(shape: Shape, layers: int, slots: int, rank: int) -> LoraSpec:
    return tiny_spec(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        inner=shape.inner,
        layers=layers,
        slots=slots,
        max_rank=rank,
        cpu_capacity=slots,
    )


def _adapter(spec: LoraSpec, dtype: torch.dtype, seed: int) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = {}, {}
    for target in spec.targets:
        a_shape, b_shape = slot_shapes(spec, target, 0, 1)
        a[target.name] = torch.randn(a_shape, generator=generator).mul_(0.02).to(dtype)
        b[target.name] = torch.randn(b_shape, generator=generator).mul_(0.02).to(dtype)
    key = AdapterKey(f"a{seed}", 0)
    return LoadedAdapter(key=key, digest="", lora_rank=spec.max_rank, scaling={}, a=a, b=b)
