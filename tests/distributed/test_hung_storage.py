"""One rank's storage hangs, for as long as the test wants: nobody else notices, and no step waits.

Nothing here depends on how long anything takes: the fault lasts until the test takes it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.instance import Instance

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.testing.faults import FaultFile, SlowRead, write_faults
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

NAMES = ("a", "b", "c")
GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = range(3, 15)
Request = tuple[range, SamplingParams, AdapterKey | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("faults")
    make_tiny_model(folder / "model", "llama", seed=7)
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, folder / "model", rank=4, seed=seed, strength=2.0)
    return folder


@pytest.fixture(scope="module")
def faults(folder: Path) -> FaultFile:
    write_faults(folder / "faults.json", [])
    return FaultFile(folder / "faults.json")


@pytest.fixture(scope="module")
def instance(folder: Path, faults: FaultFile) -> Iterator[Instance]:
    with Instance(_config(folder), faults=faults.path) as instance:
        yield instance


@pytest.fixture(scope="module")
def alone(instance: Instance) -> dict[str | None, list[int]]:
    """Each adapter's answer, by itself."""
    return {name: instance.generate([_ask(name)])[0].ids for name in (None, *NAMES)}


def _config(folder: Path) -> ServeConfig:
    lora = {
        "adapters": {name: str(folder / name) for name in NAMES},
        "max_loras": 2,
        # Two copies at most: whoever is asked for after two others is read again.
        "max_cpu_loras": 2,
    }
    engine = {
        "model": str(folder / "model"),
        "tensor_parallel_size": 2,
        "threads": 1,
        "max_model_len": 64,
        "block_size": 4,
        "lora": lora,
    }
    return build_config({"engine": engine}, source="test")


def _ask(name: str | None) -> Request:
    return PROMPT, GREEDY, None if name is None else AdapterKey(name, FIRST_GENERATION)


@pytest.mark.parametrize("rank", [0, 1])
def test_while_one_ranks_storage_hangs_all_others_go_on_and_no_step_waits(
    instance: Instance, faults: FaultFile, alone: dict[str | None, list[int]], rank: int
) -> None:
    for name in ("a", "b"):  # whose copies and slots leave none of c's
        assert instance.generate([_ask(name)])[0].ids == alone[name]
    faults.write([SlowRead(rank=rank, adapter="c", seconds=3600)])
    stuck = instance.submit(*_ask("c"))
    for name in (None, "a", None, "b"):
        assert instance.generate([_ask(name)])[0].ids == alone[name]
    waiting = instance.inspect()
    assert all(stuck in state.requests for state in waiting)
    faults.write([])
    assert instance.result(stuck).ids == alone["c"]
    assert [state.steps_waited_for_read for state in instance.inspect()] == [0, 0]
