"""Decoding steps in one call of C++: every logit is the modules', whatever adapters the rows have.

``tests/distributed/test_models_tp.py`` compares them on several ranks and on every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.build import Engine, build_engine
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.kernels.decode import best_of_rows
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import Step
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams
from mstar_tp.worker.state import RankState


def has_gemm(dtype: torch.dtype) -> bool:
    """A processor may have the arithmetic for one dtype alone."""
    kernels = cpu_kernels(torch.device("cpu"), dtype)
    return kernels is not None and kernels.pack_weight(torch.ones(1, 1, dtype=dtype)) is not None


EVERYTHING = SamplingParams(max_tokens=30, temperature=0, logprobs=1 << 20)
ADAPTERS = {"four": 4, "thirty": 30, "biased": 3, "normed": 2}


class OneRank:
    """A real engine of one rank, with steps given by hand."""

    def __init__(self, folder: Path, dtype: str, *, native: bool) -> None:
        torch.set_num_threads(1)
        landed: list[CopyIn] = []
        self.engine: Engine = build_engine(
            EngineConfig(
                model=str(folder / "model"),
                dtype=dtype,  # type: ignore[arg-type]
                threads=1,
                max_model_len=64,
                block_size=4,
                lora=LoraConfig(
                    adapters={name: str(folder / name) for name in ADAPTERS},
                    max_loras=len(ADAPTERS),
                    max_lora_rank=32,
                ),
            ),
            JointGroups(SingleGroup()),
            torch.device("cpu"),
            landed.append,
            lambda text: None,
        )
        self.landed = landed
        self.cpp_steps = 0
        model = self.engine.model
        if not native:
            model.plan_decode = lambda ids, rows: False  # type: ignore[method-assign]
        else:
            decode = model.decode

            def counted() -> torch.Tensor | None:
                self.cpp_steps += 1
                return decode()

            model.decode = counted  # type: ignore[method-assign]
        self.state = RankState(
            0, self.engine.requests, self.engine.kv, self.engine.lora, lambda report: None
        )
        self.runner = StepRunner(
            model,
            self.engine.requests,
            self.engine.kv,
            self.engine.lora,
            JointGroups(SingleGroup()),
            "raw_logits",
        )
        self._tp_seq = -1

    def open(self, rid: int, length: int, adapter: str | None) -> None:
        key = None if adapter is None else AdapterKey(adapter, FIRST_GENERATION)
        prompt = tuple((7 * rid * i + 3 * i) % 90 + 3 for i in range(length))
        self.state.apply(NewRequest(rid=rid, prompt=prompt, params=EVERYTHING, adapter=key))
        assert self.engine.lora is not None
        while key is not None and not any(report.key == key for report in self.landed):
            pass

    def step(self, rows: Sequence[tuple[int, int]]) -> object:
        """What each row sampled, with every logit."""
        self._tp_seq += 1
        step = Step(
            ingested=self.state.ingested,
            tp_seq=self._tp_seq,
            planned_after=self._tp_seq - 1,
            rows=tuple(rows),
            checks=self.state.checks(),
        )
        result = self.runner.run(step, lambda: None)
        assert not result.failed and result.refused is None
        return result.sampled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    model = make_tiny_model(folder / "model", "qwen2", seed=5)
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        settings = {
            "biased": {"lora_bias": True},
            "normed": {"modules_to_save": ["input_layernorm"]},
        }.get(name, {})
        make_adapter(folder / name, model, rank=rank, seed=seed, **settings)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_base_rows_and_adapters_give_the_modules_logits(folder: Path, dtype: str) -> None:
    if not has_gemm(getattr(torch, dtype)):
        pytest.skip("no GEMM of ours here")
    native, modules = OneRank(folder, dtype, native=True), OneRank(folder, dtype, native=False)
    lengths = {0: (5, None), 1: (17, "four"), 2: (9, "thirty"), 3: (8, "four"), 4: (3, None)}
    others = {5: (6, "biased"), 6: (4, "normed")}
    for rid, (length, adapter) in (lengths | others).items():
        for rank in (native, modules):
            rank.open(rid, length, adapter)
    plain = list(lengths)
    steps = [[(rid, length) for rid, (length, _) in lengths.items()]]
    steps += [[(rid, 1) for rid in plain]] * 5  # over the end of a page of four
    steps += [[(rid, 1) for rid in plain if rid != 2], [(1, 1)], [(0, 1), (4, 1)]]
    for number, rows in enumerate(steps):
        assert native.step(rows) == modules.step(rows), number
    assert native.cpp_steps == len(steps) - 1
    # What adapters change besides linears, and a chunk beside decoding rows: the modules' way.
    steps = [[(0, 1), (5, 6)], [(6, 4), (1, 1)], [(0, 1), (5, 1)], [(6, 1), (0, 1)]]
    for number, rows in enumerate(steps):
        assert native.step(rows) == modules.step(rows), number
    assert native.cpp_steps == 8
    assert native.engine.model._cpp_decoder is not None
    layers = native.engine.model._cpp_decoder._decoder.layers
    assert layers[0].angles == layers[1].angles, "every layer keeps its own table of angles"


def test_the_best_of_each_row_is_the_first_of_the_largest_and_says_whether_it_is_a_number() -> None:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    x[0, 11] = x[0, 60] = 9.0
    x[1, 69] = 9.0
    x[2, 3] = torch.inf
    x[3, 68] = torch.nan
    x[4] = -torch.inf
    found = best_of_rows(x[:, :70])
    if cpu_kernels(torch.device("cpu"), torch.float32) is None:
        assert found is None
        return
    assert found is not None
    best, finite = found
    assert best[:3] == [11, 69, 3]
    assert finite == [True, True, False, False, False]
    assert best_of_rows(x.bfloat16()) is None
