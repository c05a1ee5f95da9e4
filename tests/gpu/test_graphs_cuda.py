"""Captured graphs and tokens that stay on a CUDA device: replayed, padded and overlapped steps say
what eager steps that wait for each other say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lockstep_ranks import LockstepRanks

from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.engine.graphs.buckets import Kind, Variant
from mstar_tp.engine.sampling.device_sampling import sample_on_device
from mstar_tp.engine.sampling.sampler import Sampled, SampleRow, sample
from mstar_tp.engine.scheduling.requests import NO_TOKEN
from mstar_tp.kernels.staging import StagedTable
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS: list[tuple[str | None, dict[str, Any]]] = [
    ("one", {"temperature": 0.0}),
    (None, {"temperature": 0.0}),
    ("two", {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9}),
    (None, {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5}),
    ("one", {"temperature": 0.0, "logprobs": 2}),
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder / "model", request.param, seed=5)
    for seed, (name, rank) in enumerate({"one": 4, "two": 16}.items()):
        make_adapter(folder / name, folder / "model", rank=rank, seed=seed)
    return folder


def start(folder: Path, *, eager: bool = False, deferred: bool = False) -> LockstepRanks:
    config = EngineConfig(
        model=str(folder / "model"),
        device="cuda",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=128,
        block_size=16,
        num_kv_pages=40,
        enforce_eager=eager,
        lora=LoraConfig(
            adapters={n: str(folder / n) for n in ("one", "two")}, max_loras=2, max_lora_rank=16
        ),
    )
    return LockstepRanks(config, deferred=deferred, device=torch.device("cuda", 0))


def serve(ranks: LockstepRanks, rows: Sequence[tuple[str | None, dict[str, Any]]]) -> list[Any]:
    """Each row's tokens; rows end one after another, so buckets are padded."""
    launched = type(ranks.runners[0]).__name__ == "DeferredRunner"
    said: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    count: dict[int, int] = {}
    for i, (name, settings) in enumerate(rows):
        key = None if name is None else AdapterKey(name, FIRST_GENERATION)
        params = SamplingParams(max_tokens=12 - 2 * i, **settings)
        rid = ranks.open(range(3 + i, 15 + 3 * i), params, key)
        assert key is None or ranks.wait_copies(rid) is None
        said[rid], left[rid], count[rid] = [], 12 - 2 * i, 12 + 2 * i
    live = set(said)
    while live:
        step = [(rid, count[rid]) for rid in said if rid in live and left[rid]]
        for rid, _ in step:
            left[rid] -= 1
            count[rid] = 1
        if not step:
            results = ranks.flush()[0]
        else:
            results = ranks.launch(step)[0] if launched else ranks.step(step)[:1]
        for result in results:
            assert not result.failed
            for rid, sampled in result.sampled.items():
                said[rid].append(sampled.token)
            live -= set(result.ended)
    for rid in said:
        ranks.remove(rid)
    return list(said.values())


def test_replayed_and_overlapped_steps_give_the_tokens_of_eager_ones(folder: Path) -> None:
    eager = start(folder, eager=True)
    assert eager.engines[0].graphs is None
    wanted = serve(eager, ROWS), serve(eager, [ROWS[1]])
    eager.close()
    for deferred in (False, True):
        ranks = start(folder, deferred=deferred)
        graphs = ranks.engines[0].graphs
        assert graphs is not None, "a capture failed, or its replay was not eager's bit for bit"
        kinds = {(key.kind, key.variant) for key in graphs.graphs}
        assert kinds == {(kind, variant) for kind in Kind for variant in Variant}
        assert (serve(ranks, ROWS), serve(ranks, [ROWS[1]])) == wanted
        ranks.close()


def test_padding_changes_no_page(folder: Path) -> None:
    ranks = start(folder)
    engine = ranks.engines[0]
    params = SamplingParams(max_tokens=30, temperature=0)
    rids = [ranks.open(range(3 + i, 12 + i), params) for i in range(4)]
    ranks.step([(rid, 9) for rid in rids])
    ranks.step([(rid, 1) for rid in rids])
    ranks.remove(rids.pop())
    before = [part.clone() for cache in engine.model.kv for part in (cache.k, cache.v)]
    ranks.step([(rid, 1) for rid in rids])
    mine = {page for rid in rids for page in engine.kv.table.held(rid)}
    others = [page for page in range(40) if page not in mine]
    after = [part for cache in engine.model.kv for part in (cache.k, cache.v)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[others].nan_to_num(7), new[others].nan_to_num(7))
    ranks.close()


def test_the_device_draws_what_the_host_draws() -> None:
    torch.manual_seed(3)
    logits = torch.randn(60, 5000) * 3
    logits[7, 5] = float("nan")
    rows = [
        SamplingParams(
            max_tokens=9,
            temperature=(0.0, 0.7, 1.5)[i % 3],
            top_k=(0, 50, 10_000, 1)[i % 4],
            top_p=(1.0, 0.8, 0.05)[i % 5 % 3],
            min_p=(0.0, 0.1)[i % 7 % 2],
            seed=1000 + i,
        )
        for i in range(60)
    ]
    host = [SampleRow(params=p, tokens=[1] * (i + 2), prompt_len=1) for i, p in enumerate(rows)]
    wanted = [d.token if isinstance(d, Sampled) else NO_TOKEN for d in sample(logits, host)]
    got = sample_on_device(logits.cuda(), [(params, i + 2) for i, params in enumerate(rows)])
    assert got.tolist() == wanted


def test_a_table_may_be_written_again_while_its_last_copies_run() -> None:
    table = StagedTable(torch.zeros(1 << 20, dtype=torch.int32, device="cuda"))
    seen = []
    for step in range(8):
        table.write(torch.full((1 << 20,), step, dtype=torch.int32))
        seen.append(table.table.clone())
    assert [int(each.min()) for each in seen] == [int(each.max()) for each in seen]
    assert [int(each[0]) for each in seen] == list(range(8))
