"""The attention operators keep torch's rules, plans hold every step that fits their buffers or
refuse it, and each backend is chosen, or refused with what to do.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import AttentionCase

from mstar_tp.common.errors import ConfigError, LockstepError
from mstar_tp.kernels.triton.attention.sizes import decode_splits
from mstar_tp.layers.attention import backend
from mstar_tp.layers.attention.attention import Attention, AttentionShape, TorchPlanner
from mstar_tp.layers.attention.backend import attention_planner
from mstar_tp.layers.attention.paged_plan import PagedPlanner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(6, 2, 8, 0.3, 20, 5.0)
CASE = AttentionCase(shape=SHAPE, dtype=torch.float32, device=CPU, page_size=4)
SPANS = ((30, 1), (0, 5), (17, 3), (0, 1))


def test_operators_pass_torchs_own_checks() -> None:
    rows = CASE.rows(SPANS)
    step, plan = CASE.step(rows), CASE.planner().plan(rows)
    cache = step.cache.nan_to_num_()  # torch compares what the operators leave unchanged
    checks = ("test_schema", "test_faketensor")
    writing = (cache[0], cache[1], step.k, step.v, plan.slots_T)
    torch.library.opcheck(torch.ops.mstar_attention.write.default, writing, test_utils=checks)
    tables = plan.pages_BW, plan.lengths_B, plan.starts, plan.tiles_N2
    attending = (step.q, cache[0], cache[1], *tables, True, False, 20, 0.3, 5.0, False)
    torch.library.opcheck(torch.ops.mstar_attention.attend.default, attending, test_utils=checks)


def test_a_layer_is_two_nodes_to_torch_compile() -> None:
    rows = CASE.rows(SPANS)
    step, plan = CASE.step(rows), CASE.planner().plan(rows)
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plan.attend(SHAPE, q, k, v, keys, values)

    keys, values = step.cache
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    assert torch.equal(compiled(step.q, step.k, step.v), step.attend(plan))
    assert seen == [torch.ops.mstar_attention.write, torch.ops.mstar_attention.attend]


@pytest.mark.parametrize("spans", [(), SPANS, ((0, 40),), ((9, 1),) * 8, ((0, 2),) * 8])
def test_a_bucket_holds_every_mix_of_its_rows(spans: tuple[tuple[int, int], ...]) -> None:
    buffer = CASE.planner().mixed_buffer(8, 40, 16)
    rows = CASE.rows(spans)
    plan = buffer.fill(rows)
    assert plan is buffer.plan
    CASE.step(rows, num_tokens=40).check(plan)
    places = plan.tiles_N2.tolist()
    tokens = [
        (row, token)
        for row, first in places
        if row >= 0
        for token in range(
            first, min(first + CASE.planner().tile_queries, int(plan.starts[row + 1]))
        )
    ]
    starts = plan.starts.tolist()
    wanted = [
        (at, token)
        for at, row in enumerate(rows)
        if row.num_tokens > 1
        for token in range(starts[at], starts[at + 1])
    ]
    assert sorted(tokens) == wanted


def test_a_step_that_a_bucket_cannot_hold_is_refused_and_leaves_it_as_it_was() -> None:
    buffer = CASE.planner().decode_buffer(2, 3)
    plan = buffer.fill(CASE.rows([(5, 1)]))
    before = [tensor.clone() for tensor in (plan.lengths_B, plan.starts, plan.slots_T)]
    for spans, what in (
        ([(0, 1)] * 3, "3 rows, 3 tokens"),
        ([(0, 2)], "1 rows, 2 tokens, 1 tiles"),
        ([(12, 1)], "up to 4 pages a row"),
    ):
        with pytest.raises(LockstepError, match=what):
            buffer.fill(CASE.rows(spans))
    after = (plan.lengths_B, plan.starts, plan.slots_T)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_splits_follow_from_shapes_alone() -> None:
    assert decode_splits(1, 8, 4096, invariant=False) == 32
    assert decode_splits(8, 8, 4096, invariant=False) == 4
    assert decode_splits(256, 8, 4096, invariant=False) == 1
    assert decode_splits(1, 8, 200, invariant=False) == 2, "no part has next to nothing"
    assert {decode_splits(rows, 8, 4096, invariant=True) for rows in (1, 8, 256)} == {16}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Attention(0, 4, 2, 80, 0.1))


def choose(backend: str, device: torch.device, *, invariant: bool = False) -> object:
    return attention_planner(backend, model(), torch.float16, 16, device, invariant=invariant)


def test_auto_takes_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose("auto", CPU), TorchPlanner)
    assert isinstance(choose("auto", CPU, invariant=True), TorchPlanner)
    assert isinstance(choose("auto", CUDA), PagedPlanner)
    monkeypatch.setattr(backend, "triton_is_here", lambda: False)
    assert isinstance(choose("auto", CUDA), TorchPlanner)


@pytest.mark.parametrize(
    ("backend", "device", "invariant", "said"),
    [
        ("triton", CPU, False, "needs a CUDA device and this rank computes on cpu: use auto or"),
        ("flashinfer", CPU, False, "needs a CUDA device"),
        ("flashinfer", CUDA, False, "serves heads of 64, 128, 256 and this model's have 80: use"),
        ("torch", CUDA, True, "--batch-invariant needs the attention backend triton and this is"),
        ("flashinfer", CUDA, True, "--batch-invariant needs the attention backend triton"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(
    backend: str, device: torch.device, invariant: bool, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(backend, device, invariant=invariant)


def test_flashinfer_is_refused_where_it_is_not_or_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 2, 128, 0.1)
    with pytest.raises(ConfigError, match="not float32: use triton"):
        backend.load_flashinfer(shape, torch.float32)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="flashinfer-python, which cannot be imported"):
        backend.load_flashinfer(shape, torch.float16)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    with pytest.raises(ConfigError, match="has no BatchDecodeWithPagedKVCacheWrapper"):
        backend.load_flashinfer(shape, torch.float16)
