"""Deltas are right for every mix of rows, and touch adapter rows only: base rows keep every bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.lora.device import delta_plan
from mstar_tp.lora.device.slot_weights import Backend, SlotWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.wire.values import AdapterKey

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


CHOSEN: dict[str, Backend] = {"backend": "auto"}
TORCH_ALONE = "mstar_tp.lora.device.slot_weights.cpu_kernels"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=["kernels", "torch", "operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on our CPU kernels, on torch alone as where they cannot be compiled, and on
    the operators that CUDA devices take.
    """
    if request.param == "operators":
        monkeypatch.setitem(CHOSEN, "backend", "ops")
    elif request.param == "torch":
        monkeypatch.setattr(TORCH_ALONE, lambda device, dtype: None)
    elif cpu_kernels(torch.device("cpu"), torch.float32) is None:
        pytest.skip("no C++ compiler")


def adapter(
    spec: LoraSpec, dtype: torch.dtype, seed: int, rank: int, targets: list[str] | None = None
) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = {}, {}
    for target in spec.targets:
        if targets is not None and target.name not in targets:
            continue
        a_shape, b_shape = slot_shapes(spec, target, 0, 1)
        slices = len(target.out_slices)
        full = torch.randn(a_shape, generator=generator).unflatten(1, (slices, spec.max_rank))
        full[:, :, rank:] = 0
        a[target.name] = full.flatten(1, 2).to(dtype)
        b[target.name] = torch.randn(b_shape, generator=generator).to(dtype)
        b[target.name][:, :, rank:] = 0
    return LoadedAdapter(
        key=AdapterKey(f"a{seed}", 1), digest="", lora_rank=rank, scaling={}, a=a, b=b
    )


def make(spec: LoraSpec, dtype: torch.dtype) -> SlotWeights:
    return SlotWeights(
        spec,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        dtype=dtype,
        backend=CHOSEN["backend"],
    )


def exact(
    spec: LoraSpec, adapters: dict[int, LoadedAdapter], name: str, slots: list[int], x: torch.Tensor
) -> torch.Tensor:
    """Layer 1's deltas in float64, row by row."""
    target = {t.name: t for t in spec.targets}[name]
    out = torch.zeros(len(x), target.out_features, dtype=torch.float64)
    for row, slot in enumerate(slots):
        if slot == 0 or name not in adapters[slot].a:
            continue
        a, b = adapters[slot].a[name][1].double(), adapters[slot].b[name][1].double()
        first = 0
        for index, part in enumerate(target.out_slices):
            rows = slice(first, first + part.out_features)
            a_part = a[index * spec.max_rank : (index + 1) * spec.max_rank]
            out[row, rows] = b[rows] @ (a_part @ x[row].double())
            first = rows.stop
    return out


steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 5, 30])), min_size=1, max_size=8
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the same way in every example
)
@given(
    rows=steps,
    dtype=st.sampled_from(DTYPES),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    name=st.sampled_from([t.name for t in tiny_spec().targets]),
    seed=st.integers(0, 1000),
)
def test_deltas_equal_float64_and_base_rows_keep_every_bit(
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    ranks: tuple[int, int, int],
    name: str,
    seed: int,
) -> None:
    spec = tiny_spec(slots=3, max_rank=4)
    adapters = {s: adapter(spec, dtype, seed + s, rank) for s, rank in enumerate(ranks, start=1)}
    weights = make(spec, dtype)
    weights.install(list(adapters.items()))
    slots, counts = [s for s, _ in rows], [n for _, n in rows]
    by_token = [s for s, n in rows for _ in range(n)]
    target = {t.name: t for t in spec.targets}[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(by_token), target.in_features, generator=generator).to(dtype)
    y = torch.randn(len(by_token), target.out_features, generator=generator).to(dtype)
    plan = weights.plan(slots, counts)
    got = weights.layer(name, 1).add(y.clone(), x, plan) if plan.has_work else y.clone()
    base = [i for i, s in enumerate(by_token) if s == 0]
    assert torch.equal(got[base], y[base])
    wanted = y.double() + exact(spec, adapters, name, by_token, x)
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_with_its_deltas_is_the_linear_and_then_its_deltas_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    """Rows past the fused kernel's limit, odd ranks, slices that end inside a panel, two threads;
    and a row's bits are its own in any company.
    """
    spec = tiny_spec(slots=3, max_rank=5, hidden=40, head_dim=20, inner=72)
    weights = make(spec, dtype)
    weights.install([(s, adapter(spec, dtype, s, rank)) for s, rank in ((1, 5), (2, 1), (3, 4))])
    slots, counts = [1, 0, 2, 3, 1, 2], [1, 30, 70, 1, 140, 9]
    generator = torch.Generator().manual_seed(0)
    for target in (t for t in spec.targets if t.parallel.is_linear):
        base = LinearWeight(
            torch.randn(target.out_features, target.in_features, generator=generator).to(dtype)
        )
        base.pack()
        layer = weights.layer(target.name, 1)
        x = torch.randn(sum(counts), target.in_features, generator=generator).to(dtype)
        plan = weights.plan(slots, counts)
        torch.set_num_threads(2)
        got = layer.linear(base, None, x, plan)
        torch.set_num_threads(1)
        assert torch.equal(got, layer.add(base(x), x, plan)), target.name
        if base.packed is not None and plan.grouped is not None and not plan.segments:
            few = layer.linear(base, None, x[31:101], weights.plan([2], [70]))
            assert torch.equal(few, got[31:101]), "the rows beside a row changed it"
            lone = layer.linear(base, None, x[101:102], weights.plan([3], [1]))
            assert torch.equal(lone, got[101:102])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_and_short_runs_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec(slots=3, max_rank=4, hidden=32, head_dim=8, inner=64)
    weights = make(spec, dtype)
    weights.install([(s, adapter(spec, dtype, s, s)) for s in (1, 2, 3)])
    slots, counts = [1, 0, 2, 3, 1], [1, 2, 3, 1, 4]
    outs = []
    for segment_rows in (1, 3, 1 << 30):
        monkeypatch.setattr(delta_plan, "SEGMENT_ROWS", segment_rows)
        torch.manual_seed(0)
        x, y = torch.randn(11, 32).to(dtype), torch.randn(11, 64).to(dtype)
        out = weights.layer("self_attn.qkv_proj", 0).add(y, x, weights.plan(slots, counts))
        outs.append(out.float())
    scale = float(outs[0].abs().max())
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_bits_in_any_company_and_on_any_number_of_threads(
    threads: int,
) -> None:
    spec = tiny_spec(slots=3, max_rank=4, hidden=32, head_dim=8, inner=64)
    weights = make(spec, torch.bfloat16)
    weights.install([(s, adapter(spec, torch.bfloat16, s, 4)) for s in (1, 2, 3)])
    layer = weights.layer("mlp.gate_up_proj", 1)
    torch.manual_seed(0)
    x, y = torch.randn(5, 32).bfloat16(), torch.randn(5, 128).bfloat16()
    slots = [1, 2, 3, 1, 2]
    alone = [
        layer.add(y[i : i + 1].clone(), x[i : i + 1], weights.plan([slot], [1]))
        for i, slot in enumerate(slots)
    ]
    plan = weights.plan(slots, [1] * 5)
    if plan.grouped is None:
        pytest.skip("torch's own GEMMs promise no such thing")
    torch.set_num_threads(threads)
    assert torch.equal(layer.add(y.clone(), x, plan), torch.cat(alone))


def test_a_decode_rows_bits_do_not_depend_on_a_long_run_beside_it() -> None:
    spec = tiny_spec(slots=2, max_rank=4, hidden=32, head_dim=8, inner=64)
    weights = make(spec, torch.bfloat16)
    weights.install([(1, adapter(spec, torch.bfloat16, 1, 4))])
    layer, tokens = weights.layer("mlp.gate_up_proj", 1), delta_plan.SEGMENT_ROWS
    torch.manual_seed(0)
    x, y = torch.randn(tokens + 2, 32).bfloat16(), torch.randn(tokens + 2, 128).bfloat16()
    plan = weights.plan([1, 1, 1], [1, tokens, 1])
    together = layer.add(y.clone(), x, plan)
    if plan.grouped is None:
        pytest.skip("torch's own GEMMs promise no such thing")
    for row in (0, tokens + 1):
        alone = layer.add(y[row : row + 1].clone(), x[row : row + 1], weights.plan([1], [1]))
        assert torch.equal(together[row : row + 1], alone)


def test_an_evicted_adapter_leaves_nothing_behind() -> None:
    spec = tiny_spec(slots=1, max_rank=4)
    used, fresh = make(spec, torch.float32), make(spec, torch.float32)
    full = adapter(spec, torch.float32, 1, 4)
    small = adapter(spec, torch.float32, 2, 2, ["self_attn.qkv_proj"])
    used.install([(1, full)])
    used.install([(1, small)])
    fresh.install([(1, small)])
    for target in spec.targets:
        x, y = torch.randn(2, target.in_features), torch.randn(2, target.out_features)
        outs = [
            w.layer(target.name, 1).add(y.clone(), x, w.plan([1, 1], [1, 1])) for w in (used, fresh)
        ]
        assert torch.equal(outs[0], outs[1])
        assert target.name in small.a or torch.equal(outs[0], y)


def test_a_plan_is_kept_for_steps_alike_until_a_slot_changes() -> None:
    spec = tiny_spec()
    weights = make(spec, torch.float32)
    name = spec.targets[0].name
    plain = adapter(spec, torch.float32, 1, 2)
    weights.install([(1, plain)])
    first = weights.plan([1, 0], [1, 1])
    if first.tiled is None:
        assert weights.plan([1, 0], [1, 1]) is first
    assert weights.plan([1, 0], [1, 2]).num_rows == 3
    assert not weights.plan([1, 0], [1, 1]).biased
    target = spec.targets[0]
    bias = {name: torch.ones(target.num_layers, target.out_features)}
    weights.install([(1, replace(plain, bias=bias))])
    assert weights.plan([1, 0], [1, 1]).biased


def test_one_slots_overflow_never_reaches_another_slots_row() -> None:
    spec = tiny_spec(slots=2, max_rank=2)
    weights = make(spec, torch.float16)
    loud, quiet = adapter(spec, torch.float16, 1, 2), adapter(spec, torch.float16, 2, 2)
    loud.a["mlp.down_proj"].fill_(60000.0)
    weights.install([(1, loud), (2, quiet)])
    x, y = torch.full((2, 16), 8.0).half(), torch.zeros(2, 8).half()
    out = weights.layer("mlp.down_proj", 0).add(y, x, weights.plan([1, 2], [1, 1]))
    assert not out[0].isfinite().all() and out[1].isfinite().all() and out[1].any()


def test_installs_copy_and_never_change_the_host_copy() -> None:
    spec = tiny_spec()
    host = adapter(spec, torch.float32, 3, 3)
    before = {
        k: v.clone() for k, v in (*host.a.items(), *((f"b{k}", v) for k, v in host.b.items()))
    }
    weights = make(spec, torch.float32)
    for _ in range(3):
        weights.install([(1, host), (2, host)])
    after = {**host.a, **{f"b{k}": v for k, v in host.b.items()}}
    assert all(torch.equal(before[k], after[k]) for k in before)
