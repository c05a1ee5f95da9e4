#!/usr/bin/env python3
"""Measure the CPU deltas of one decode and one prefill step, all layers of all targets.

    python scripts/bench_deltas.py [--model tiny|small] [--threads 2]

Prints, for each way to apply the deltas, the milliseconds that all of a step's delta calls take
together (median and minimum over repeats, so a loaded machine shows), and what installing an
adapter costs. The base GEMMs of the same step are there for scale. docs/decisions.md records a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.lora.device import delta_plan, slot_weights
from mstar_tp.lora.device.slot_weights import SlotWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.wire.values import AdapterKey


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


SHAPES = {
    "tiny": Shape(256, 688, 4, 8, 4, 32, torch.float32),
    "small": Shape(896, 4864, 24, 14, 2, 64, torch.bfloat16),
}
SLOTS, RANK = 8, 16


def spec_of(shape: Shape, slots: int) -> LoraSpec:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def target(name: str, size_in: int, outs: dict[str, int], parallel: LoraParallel) -> LoraTarget:
        return LoraTarget(
            name=name,
            stack="model.layers",
            num_layers=shape.layers,
            parent=name,
            in_features=size_in,
            out_slices=tuple(OutSlice(name=n, out_features=o, units=o) for n, o in outs.items()),
            parallel=parallel,
            in_units=size_in,
        )

    column, row = LoraParallel.COLUMN, LoraParallel.ROW
    targets = (
        target("qkv", shape.hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, column),
        target("o", q, {"o_proj": shape.hidden}, row),
        target("gate_up", shape.hidden, {"gate_proj": shape.inner, "up_proj": shape.inner}, column),
        target("down", shape.inner, {"down_proj": shape.hidden}, row),
    )
    return LoraSpec(
        targets=targets, slots=slots, max_rank=RANK, cpu_capacity=2 * slots, dtype=str(shape.dtype)
    )


def random_adapter(spec: LoraSpec, dtype: torch.dtype, seed: int) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = {}, {}
    for target in spec.targets:
        a_shape, b_shape = slot_shapes(spec, target, 0, 1)
        a[target.name] = torch.randn(a_shape, generator=generator).to(dtype)
        b[target.name] = torch.randn(b_shape, generator=generator).to(dtype)
    return LoadedAdapter(
        key=AdapterKey(f"a{seed}", 0), digest="", lora_rank=RANK, scaling={}, a=a, b=b
    )


def measure(work: Callable[[], object], repeats: int) -> str:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return f"{statistics.median(times):8.2f} {min(times):8.2f}"


class Bench:
    def __init__(self, shape: Shape, slots: int, repeats: int) -> None:
        self.shape, self.slots, self.repeats = shape, slots, repeats
        self.spec = spec_of(shape, slots)
        self.adapters = [random_adapter(self.spec, shape.dtype, seed) for seed in range(slots)]
        self.sites = [(t, n) for n in range(shape.layers) for t in self.spec.targets]

    def weights(self, *, kernels: bool = True) -> SlotWeights:
        use = slot_weights.cpu_kernels if kernels else (lambda device, dtype: None)
        with mock.patch.object(slot_weights, "cpu_kernels", use):
            weights = SlotWeights(
                self.spec,
                rank=0,
                world_size=1,
                device=torch.device("cpu"),
                dtype=self.shape.dtype,
            )
        weights.install(list(enumerate(self.adapters, start=1)))
        return weights

    def activations(self, rows: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {
            t.name: (
                torch.randn(rows, t.in_features, dtype=self.shape.dtype),
                torch.randn(rows, t.out_features, dtype=self.shape.dtype),
            )
            for t in self.spec.targets
        }

    def step(self, weights: SlotWeights, slots: list[int], counts: list[int]) -> str:
        xy = self.activations(sum(counts))
        layers = [(weights.layer(t.name, n), *xy[t.name]) for t, n in self.sites]

        def work() -> None:
            plan = weights.plan(slots, counts)
            for layer, x, y in layers:
                layer.add(y, x, plan)

        return measure(work, self.repeats)

    def base(self, rows: int) -> str:
        xy = self.activations(rows)
        gemms = []
        for target, _ in self.sites:
            weight = LinearWeight(
                torch.randn(target.out_features, target.in_features, dtype=self.shape.dtype)
            )
            weight.pack()
            gemms.append((weight, xy[target.name][0]))
        return measure(lambda: [weight(x) for weight, x in gemms], self.repeats)

    def gathered(self, slots: list[int], rows: int) -> str:
        """Each row's own A and B gathered, two batched products: what no slot grouping costs."""
        xy = self.activations(rows)
        index = torch.tensor(slots).repeat_interleave(rows // len(slots)) - 1
        sites = []
        for target, layer in self.sites:
            a = torch.stack([adapter.a[target.name][layer] for adapter in self.adapters])
            b = torch.stack([adapter.b[target.name][layer] for adapter in self.adapters])
            sites.append((a, b, target, *xy[target.name]))

        def work() -> None:
            for a, b, target, x, y in sites:
                h = torch.bmm(a[index], x[:, :, None])[:, :, 0]
                picked, first = b[index], 0
                for i, part in enumerate(target.out_slices):
                    rows_ = slice(first, first + part.out_features)
                    h_part = h[:, i * RANK : (i + 1) * RANK, None]
                    y[:, rows_] += torch.bmm(picked[:, rows_], h_part)[:, :, 0]
                    first = rows_.stop

        return measure(work, min(3, self.repeats))

    def dense(self, slots: list[int], rows: int) -> str:
        """Every slot's A, packed, a mask that keeps each row's own columns, every slot's B."""
        xy = self.activations(rows)
        owners = torch.tensor(slots).repeat_interleave(rows // len(slots)) - 1
        columns = torch.arange(self.slots).repeat_interleave(RANK)
        foreign = owners[:, None] != columns
        sites = []
        for target, layer in self.sites:
            tables = [(x.a[target.name][layer], x.b[target.name][layer]) for x in self.adapters]
            first = 0
            for i, part in enumerate(target.out_slices):
                out = slice(first, first + part.out_features)
                a = LinearWeight(torch.cat([a[i * RANK : (i + 1) * RANK] for a, _ in tables]))
                b = LinearWeight(torch.cat([b[out] for _, b in tables], dim=1))
                a.pack()
                b.pack()
                x, y = xy[target.name]
                sites.append((a, b, x, y[:, out]))
                first = out.stop

        def work() -> None:
            for a, b, x, y in sites:
                y.add_(b(a(x).masked_fill_(foreign, 0)))

        return measure(work, self.repeats)


KERNEL_ALONE = 1 << 30


def steps(bench: Bench, row: Callable[[str, Callable[[], str]], None]) -> None:
    for name, tokens in (("decode 8", 1), ("prefill 512", 64)):
        counts = [tokens] * 8
        row(f"{name}: base GEMMs", partial(bench.base, sum(counts)))
        for adapters in (1, 2, 8):
            slots = [1 + i * adapters // 8 for i in range(8)]
            label = f"{name}, {adapters} adapters: "

            def ours(
                segment_rows: int,
                kernels: bool,
                slots: list[int] = slots,
                counts: list[int] = counts,
            ) -> str:
                with mock.patch.object(delta_plan, "SEGMENT_ROWS", segment_rows):
                    return bench.step(bench.weights(kernels=kernels), slots, counts)

            row(label + "chosen", partial(ours, delta_plan.SEGMENT_ROWS, True))
            row(label + "kernel alone", partial(ours, KERNEL_ALONE, True))
            row(label + "per-slot segments", partial(ours, 1, False))
            row(label + "masked dense, packed", partial(bench.dense, slots, sum(counts)))
            row(label + "gathered bmm", partial(bench.gathered, slots, sum(counts)))


def installs(shape: Shape, repeats: int, row: Callable[[str, Callable[[], str]], None]) -> None:
    bench = Bench(shape, SLOTS, repeats)
    weights = bench.weights()
    install = partial(weights.install, [(1, bench.adapters[0])])
    row("install 1 adapter", partial(measure, install, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose label contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    print(f"{args.model}, {args.threads} threads, {SLOTS} slots of rank {RANK}; ms: median, min")

    def row(label: str, work: Callable[[], str]) -> None:
        if args.only in label:
            print(f"{label:58}{work()}", flush=True)

    shape = SHAPES[args.model]
    steps(Bench(shape, SLOTS, args.repeats), row)
    installs(shape, args.repeats, row)


if __name__ == "__main__":
    main()
