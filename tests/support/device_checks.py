"""Checks of a device: every kernel, captured graphs, copies beside steps, whole models.

Shared by ``scripts/gpu_check.py`` and ``tests/gpu``. ``tiny`` sizes are for Triton's interpreter,
which runs those that need no device of their own on CPU tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.lora.device.device_copies import queues_of
from mstar_tp.lora.device.expert_ops import grouped, tiled_pairs
from mstar_tp.lora.device.expert_weights import ExpertWeights
from mstar_tp.lora.device.slot_weights import SlotWeights
from mstar_tp.lora.device.tiles import TileBuffer, TileSizes
from mstar_tp.testing.tiny_models import MOE_TARGETS, Family, make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams
from support.attention_cases import (
    KINDS,
    AttentionCase,
    AttentionKind,
    check_company,
    check_replays,
    check_rows,
)
from support.copy_stress import SPEC, StressDevice, numbered, wrong_steps
from support.delta_cases import DeltaCase, DeltaShape, mixed_slots, rows_by_slot, tiled
from support.expert_cases import ExpertStore, check_experts
from support.lockstep_ranks import LockstepRanks
from support.page_stress import wrong_pages
from support.vocab_cases import VocabCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """A check: ``run(device, tiny)`` raises where something is wrong.

    ``cuda``: it needs a CUDA device; ``modules``: it needs these importable too.
    """

    name: str
    run: Callable[[torch.device, bool], None]
    cuda: bool = False
    modules: tuple[str, ...] = ()


def check_lora(device: torch.device, tiny: bool) -> None:
    """Deltas of linears: every mix of rows equals float64, twice the same bits."""
    mixes = [(21, 4)] if tiny else [(1, 1), (17, 4), (64, 32), (256, 64), (1500, 7)]
    # Each rank and dtype is other code to compile: some of each.
    max_ranks = ((5,), (5,), (5,)) if tiny else ((1, 40), (3, 16, 128), (64,))
    for dtype, ranks in zip(DTYPES, max_ranks, strict=True):
        modes = (False, True) if dtype is torch.bfloat16 and not tiny else (False,)
        for max_rank, (seed, (num_tokens, slots)), invariant in product(
            ranks, enumerate(mixes, start=3), modes
        ):
            shape = DeltaShape(
                in_features=70 if tiny else 4096 if num_tokens <= 64 else 130,
                out_sizes=(40, 1) if tiny else (1024, 130, 40),
                max_rank=max_rank,
                ranks=tuple(slot * 7 % (max_rank + 1) for slot in range(1, slots + 1)),
                dtype=dtype,
            )
            mix = mixed_slots(num_tokens, slots, seed)
            rows = tiled(mix, device, invariant=invariant)
            if rows is not None:
                DeltaCase(shape, device, seed).check(mix, rows)


def check_ends(device: torch.device, tiny: bool) -> None:
    """Embedding, head, saved rows, biases and norms equal float64."""
    sizes = {} if tiny else {"hidden": 1000, "ids": 3000, "max_rank": 40}
    for dtype, num_tokens in zip(DTYPES, (21, 70, 7) if tiny else (300, 60, 9), strict=True):
        slots = mixed_slots(num_tokens, 4, seed=5)
        rows = tiled(slots, device)
        assert rows is not None
        ranks, saved = (24, 3, 0, 17), (0, 7, 1, 50)
        VocabCase(device, dtype, seed=1, ranks=ranks, saved=saved, **sizes).check(slots, rows)


def check_routed(device: torch.device, tiny: bool) -> None:
    """Routed experts and their deltas equal float64, for few tokens and many."""
    few, many = ((9, 5, 2, None), (100, 3, 2, 2)) if tiny else ((1, 16, 4, None), (700, 16, 4, 5))
    each = [(DTYPES[1], few), (DTYPES[0], many)]
    for dtype, (tokens, experts, choices, only) in each if tiny else product(DTYPES, (few, many)):
        check_experts(
            device,
            dtype,
            tokens=tokens,
            experts=experts,
            choices=choices,
            ranks=(5, 0, 8),
            hidden=48 if tiny else 300,
            inner=40 if tiny else 200,
            only=only,
            seed=3,
        )


def check_decode(device: torch.device, tiny: bool) -> None:
    """Attention of rows of one token equals float64: lengths of no key part and of many."""
    spans = ((140, 1), (0, 1)) if tiny else ((900, 1), (0, 1), (16, 1), (140, 1), (1500, 1))
    for case in _attention_cases(device, tiny):
        check_rows(case, spans, padding=3)


def check_prefill(device: torch.device, tiny: bool) -> None:
    """Attention of prompts' chunks beside rows of one token equals float64."""
    spans = ((130, 1), (17, 40)) if tiny else ((900, 1), (0, 300), (3, 1), (700, 90))
    for case in _attention_cases(device, tiny):
        check_rows(case, spans, padding=3)


def check_attention_company(device: torch.device, tiny: bool) -> None:
    """Check that the invariant mode gives a row's attention the same bits in any batch."""
    spans = ((200, 1), (40, 9)) if tiny else ((2000, 1), (20, 1), (300, 90), (1500, 1))
    for case in _attention_cases(device, tiny):
        check_company(case, spans)


def _attention_cases(device: torch.device, tiny: bool) -> list[AttentionCase]:
    """The cases: one of each kind in each dtype or, where code differs little, in one of them."""
    kinds = (AttentionKind(1, 3, 24, window=33, softcap=5.0),) if tiny else KINDS
    return [
        AttentionCase.of(kind, dtype, device, seed=index)
        for index, kind in enumerate(kinds)
        for dtype in (DTYPES if index == 0 and not tiny else (DTYPES[index % 3],))
    ]


def check_graphs(device: torch.device, tiny: bool) -> None:
    """Captured once, replayed for other mixes: the same bits as launched one by one."""
    for in_features in (64, 4096):  # in one launch, and in two with splits
        _replay_deltas(device, in_features)
    _replay_experts(device)
    for decodes in (True, False):
        case = AttentionCase.of(AttentionKind(2, 4, 64, window=600), torch.bfloat16, device)
        check_replays(case, decodes=decodes)


def _capture(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def _replay_deltas(device: torch.device, in_features: int) -> None:
    shape = DeltaShape(
        in_features=in_features,
        out_sizes=(256, 64),
        max_rank=16,
        ranks=(16, 3, 0, 9),
        dtype=torch.bfloat16,
    )
    case, buffer = DeltaCase(shape, device, 5), TileBuffer(TileSizes.of(32, 4), device)
    x, y = case.rows(32)
    rows = buffer.fill({1: list(range(32))})
    graph, out = _capture(lambda: case.apply(y, x, rows))
    for seed in range(6):
        x_new, y_new = case.rows(32)
        x.copy_(x_new)
        y.copy_(y_new)
        rows = buffer.fill(rows_by_slot(mixed_slots(32, 4, seed)))
        graph.replay()
        assert torch.equal(out, case.apply(y, x, rows)), "a replayed delta differs"


def _replay_experts(device: torch.device) -> None:
    layer = _ExpertLayer(device)
    graph, out = _capture(layer.run)
    for seed in range(6):
        layer.deal(seed)
        graph.replay()
        assert torch.equal(out, layer.run()), "a replayed layer of experts differs"


class _ExpertLayer:
    """One linear of 16 experts with the deltas of three slots, four choices a token."""

    def __init__(self, device: torch.device) -> None:
        self.store = ExpertStore(
            device,
            torch.bfloat16,
            experts=16,
            ranks=(5, 0, 8),
            in_features=256,
            out_sizes=(64, 64),
        )
        self.weights = ExpertWeights(self.store, None)
        self.weight = torch.randn(16, 128, 256, device=device).bfloat16()
        self.x = torch.randn(32, 256, device=device).bfloat16()
        self.chosen = torch.zeros(32, 4, dtype=torch.int64, device=device)
        self.slots = torch.zeros(32, dtype=torch.int64, device=device)
        self.share = torch.rand(32, 4, device=device)
        self.deal(0)

    def deal(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        likely = torch.randn(32, 16 - 2 * seed, generator=generator)
        self.chosen.copy_(likely.topk(4).indices)
        self.slots.copy_(torch.randint(0, 4, (32,), generator=generator))

    def run(self) -> torch.Tensor:
        pairs = grouped(self.chosen, 16)
        y = torch.ops.mstar_moe.linear(
            self.x, self.weight, pairs.order, pairs.tiles, 4, pairs.block_rows
        )
        changed = tiled_pairs(self.slots, 4, pairs, 3)
        self.weights.add(y, self.x, changed)
        self.weights.add_bias(y, changed)
        out: torch.Tensor = torch.ops.mstar_moe.combine(y, self.share)
        return out


def check_waits(device: torch.device, tiny: bool) -> None:
    """Installs, plans and launches never make the host wait for the device."""
    weights = SlotWeights(SPEC, rank=0, world_size=1, device=device, dtype=torch.float32)
    adapter, target = numbered(SPEC, 1, page_locked=True), SPEC.targets[0]
    x = torch.ones(4, target.in_features, device=device)
    y = torch.zeros(4, target.out_features, device=device)
    experts = _ExpertLayer(device)

    def one_of_each() -> None:
        weights.install([(1, adapter)])
        plan = weights.plan([1, 0, 1], [1, 2, 1])
        weights.layer(target.name, 0).add(y, x, plan)
        weights.launched()
        experts.run()

    one_of_each()  # compiles, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_of_each()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def check_copies(device: torch.device, tiny: bool) -> None:
    """Check that steps read the adapters their rows were given while others are copied.

    KV pages that move to host memory and back are checked too: each step finds the pages that its
    rows wrote.
    """
    busy = torch.randn(2048, 2048, device=device)

    def passes() -> None:
        torch.mm(busy, busy)  # the steps' queue lies behind the host, as it does while serving

    def launch(work: Callable[[], None]) -> None:
        work()

    for seed in range(8):
        on = StressDevice(
            device=device,
            queues=queues_of(device),
            backend="auto",
            launch=launch,
            passes=passes,
            finish=torch.cuda.synchronize,
        )
        wrong = wrong_steps(on, seed)
        assert not wrong, f"{wrong} steps read another adapter than their rows were given"
        wrong = wrong_pages(on, seed)
        assert not wrong, f"{wrong} rows found other KV in their pages than they wrote"


def check_models(device: torch.device, tiny: bool) -> None:
    """Small models with adapters beside base rows say what they say on the CPU."""
    families: tuple[Family, ...] = ("llama", "qwen3_moe", "gemma3")
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_tiny_model(folder / "model", family, seed=5)
            make_adapter(folder / "one", folder / "model", rank=4, targets=MOE_TARGETS, seed=1)
            wanted = answers(folder, torch.device("cpu"))
            for (token, logits), (its_token, its_logits) in zip(
                answers(folder, device), wanted, strict=True
            ):
                assert token == its_token, f"{family} says another token than on the CPU"
                torch.testing.assert_close(logits, its_logits, rtol=0, atol=2e-3)


def answers(folder: Path, device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """The answers of ``model`` to a row on the adapter ``one`` of ``folder`` and to one on none.

    Three steps, each a token and its logits.
    """
    config = EngineConfig(
        model=str(folder / "model"),
        dtype="float32",
        threads=1,
        max_model_len=64,
        num_kv_pages=64,
        lora=LoraConfig(adapters={"one": str(folder / "one")}, max_loras=2, max_lora_rank=8),
    )
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1 << 20)
    ranks, told = LockstepRanks(config, device), list[tuple[int, torch.Tensor]]()
    try:
        rids = []
        for first, key in enumerate((AdapterKey("one", FIRST_GENERATION), None)):
            rids.append(ranks.open(range(3 + first, 20), params, key))
        assert ranks.wait_copies(rids[0]) is None
        lengths = [17, 16]
        for rows in [list(zip(rids, lengths, strict=True))] + 2 * [[(rid, 1) for rid in rids]]:
            result = ranks.step(rows)[0]
            for rid in rids:
                drawn = result.sampled[rid]
                assert drawn.logprobs is not None
                by_id = sorted(zip(drawn.logprobs.top_ids, drawn.logprobs.top, strict=True))
                told.append((drawn.token, torch.tensor([number for _, number in by_id])))
        return told
    finally:
        ranks.close()


CHECKS = (
    DeviceCheck(name="lora kernels", run=check_lora),
    DeviceCheck(name="kernels beside the linears", run=check_ends),
    DeviceCheck(name="expert kernels", run=check_routed),
    DeviceCheck(name="attention of decodes", run=check_decode),
    DeviceCheck(name="attention of prompts", run=check_prefill),
    DeviceCheck(name="attention in any batch", run=check_attention_company),
    DeviceCheck(name="captured graphs", run=check_graphs, cuda=True),
    DeviceCheck(name="copies beside steps", run=check_copies, cuda=True),
    DeviceCheck(name="no waits of the host", run=check_waits, cuda=True),
    DeviceCheck(name="whole models", run=check_models, cuda=True, modules=("transformers", "peft")),
)
