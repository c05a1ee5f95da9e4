"""What real ranks do when things happen around a running batch: pressure, aborts, loads, bad files,
deaths.

Everything is compared with the same requests undisturbed, and the ranks' tables are read
afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.instance import Generation, Instance

from mstar_tp.common.errors import MstarError
from mstar_tp.config import ServeConfig, build_config
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.commands import Abort, Load, LoadAbort, LoadCommit, Unload
from mstar_tp.wire.reports import AdapterDigest, LoadDone, LoadResult
from mstar_tp.wire.states import StateReport
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

NAMES = ("a", "b", "c")
GREEDY = SamplingParams(max_tokens=10, temperature=0)
FEW_HOST_PAGES = 5
PAGE_GIB = 2 * 2 * 4 * 2 * 16 * 4 / (1 << 30)
"""Keys and values of 2 layers, 4 tokens, 2 heads of 16 float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("instance")
    make_tiny_model(folder / "model", "llama", seed=7)
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, folder / "model", rank=4 + seed, seed=seed)
    return folder


def _config(
    folder: Path, tp: int, adapters: dict[str, Path] | None = None, **engine: Any
) -> ServeConfig:
    adapters = {name: folder / name for name in NAMES} if adapters is None else adapters
    tree = {
        "model": str(folder / "model"),
        "tensor_parallel_size": tp,
        "threads": 1,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "lora": {"adapters": {n: str(p) for n, p in adapters.items()}, "max_loras": 2},
        **engine,
    }
    return build_config({"engine": tree}, source="test")


def _key(name: str, generation: int = FIRST_GENERATION) -> AdapterKey:
    return AdapterKey(name, generation)


def _requests(
    params: SamplingParams = GREEDY, count: int = 8
) -> list[tuple[list[int], SamplingParams, AdapterKey | None]]:
    names = [None, "a", "b", "c"]
    return [
        (list(range(3 + i, 12 + 2 * i)), params, _key(name) if name else None)
        for i, name in ((i, names[i % 4]) for i in range(count))
    ]


def _read_adapters(instance: Instance) -> None:
    """Rows that wait for a read leave their pages to others, and then none may be preempted."""
    for name in ("a", "b", "c"):
        instance.generate([(range(5, 9), SamplingParams(max_tokens=1), _key(name))])


def _assert_empty(states: list[StateReport]) -> None:
    for state in states:
        assert state.requests == ()
        assert state.pages_used == state.kv_host.pages_used == 0
        assert all(slot.holders == () for slot in state.slots)
        assert state.checks == states[0].checks
    assert states[0].waiting == states[0].running == 0


def _seeded_requests() -> list[tuple[list[int], SamplingParams, AdapterKey | None]]:
    return [
        (prompt, SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=100 + i), key)
        for i, (prompt, _, key) in enumerate(_requests())
    ]


def _varied(i: int) -> SamplingParams:
    """Every way of sampling that reads tokens sampled before, ends early or reports more."""
    more: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.4},
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.7, "seed": 6, "top_p": 0.8, "logprobs": 3},
        {"temperature": 1.3, "seed": 7, "stop_token_ids": tuple(range(0, 200, 3))},
        {"temperature": 1.3, "seed": 8, "stop_token_ids": tuple(range(200)), "min_tokens": 4},
        {"temperature": 0.8, "seed": 9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
    ]
    return SamplingParams(max_tokens=12 + i, **more[i])


def _varied_requests() -> list[tuple[list[int], SamplingParams, AdapterKey | None]]:
    return [(prompt, _varied(i), key) for i, (prompt, _, key) in enumerate(_requests())]


@dataclass
class Alone:
    """What each request gets by itself: on one rank, one step at a time."""

    undisturbed: list[list[int]]
    seeded: list[list[int]]
    varied: list[Generation]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    with Instance(_config(folder, 1, async_scheduling=False)) as instance:
        return Alone(
            [instance.generate([request])[0].ids for request in _requests()],
            [instance.generate([request])[0].ids for request in _seeded_requests()],
            [instance.generate([request])[0] for request in _varied_requests()],
        )


@pytest.fixture(scope="module")
def undisturbed(alone: Alone) -> list[list[int]]:
    return alone.undisturbed


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "one-step"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[Instance]:
    """Two ranks, and pages that run out when eight requests are in. With overlap host memory has
    room for the KV of all that are preempted, else of some.
    """
    size = (500 if request.param else FEW_HOST_PAGES) * PAGE_GIB
    sizes = {"num_kv_pages": 17, "kv_offloading_size": size}
    config = _config(folder, 2, async_scheduling=request.param, **sizes)
    with Instance(config) as instance:
        yield instance
        _assert_empty(instance.inspect())


def test_rows_preempted_for_pages_lose_nothing(
    pair: Instance, undisturbed: list[list[int]]
) -> None:
    _read_adapters(pair)
    before = pair.inspect()[0]
    answers = pair.generate(_requests())
    states = pair.inspect()
    assert [answer.ids for answer in answers] == undisturbed
    assert states[0].preemptions > before.preemptions, "the pages were meant to run out"
    _assert_empty(states)
    host = states[0].kv_host
    assert all(state.kv_host == host for state in states)
    assert host.reloads == host.offloads
    if host.pages_total > FEW_HOST_PAGES:
        assert host.reloads > before.kv_host.reloads
        assert host.recomputed_tokens == 0


def test_a_seed_draws_the_same_at_any_tp_and_batch_mix(pair: Instance, alone: Alone) -> None:
    assert [answer.ids for answer in pair.generate(_seeded_requests())] == alone.seeded
    assert len({tuple(ids) for ids in alone.seeded}) == len(alone.seeded)


def _assert_same(answers: list[Generation], wanted: list[Generation]) -> None:
    for answer, alone in zip(answers, wanted, strict=True):
        assert answer.ids == alone.ids
        for here, there in zip(answer.tokens, alone.tokens, strict=True):
            assert here.finish == there.finish
            assert (here.logprobs is None) == (there.logprobs is None)
            if here.logprobs is not None and there.logprobs is not None:
                assert here.logprobs.top_ids == there.logprobs.top_ids
                assert here.logprobs.top == pytest.approx(there.logprobs.top, abs=1e-3)


def test_penalties_stop_tokens_and_logprobs_are_what_a_request_gets_alone(
    pair: Instance, alone: Alone
) -> None:
    assert any(answer.tokens[-1].finish == "stop" for answer in alone.varied)
    _assert_same(pair.generate(_varied_requests()), alone.varied)


def test_they_are_the_same_with_prompts_in_chunks_and_rows_preempted(
    folder: Path, alone: Alone
) -> None:
    """With and without host memory for the KV of those."""
    for size, offloads in ((0.001, True), (0.0, False)):
        sizes = {"max_num_batched_tokens": 8, "num_kv_pages": 16, "kv_offloading_size": size}
        with Instance(_config(folder, 1, **sizes)) as instance:
            _read_adapters(instance)
            _assert_same(instance.generate(_varied_requests()), alone.varied)
            state = instance.inspect()[0]
            assert state.preemptions > 0, "the pages were meant to run out"
            assert (
                (state.kv_host.offloads > 0) == (state.kv_host.recomputed_tokens == 0) == offloads
            )
            _assert_empty([state])


def test_an_abort_frees_everything_and_disturbs_nobody(
    pair: Instance, undisturbed: list[list[int]]
) -> None:
    long = SamplingParams(max_tokens=50, temperature=0)
    doomed = [pair.submit(range(5, 15), long, _key(name)) for name in ("a", "c", "b")]
    rids = [pair.submit(*request) for request in _requests()]
    for rid in doomed:
        pair.send(Abort(rid=rid))
        pair.send(Abort(rid=rid))
    assert [pair.result(rid).ids for rid in rids] == undisturbed
    _assert_empty(pair.inspect())


def test_an_adapter_is_loaded_served_and_unloaded_while_its_requests_finish(
    folder: Path, pair: Instance, undisturbed: list[list[int]]
) -> None:
    key = _key("late", 1)
    pair.send(Load(load_id=1, key=key, path=str(folder / "b")))
    results = pair.wait_report(LoadResult, 2)
    assert {rank for rank, _ in results} == {0, 1}
    assert all(result.cause is None and result.lora_rank == 5 for _, result in results)
    pair.send(LoadCommit(load_id=1))
    assert pair.wait_report(LoadDone)[0][1].cause is None
    prompt = _requests()[2][0]
    rid = pair.submit(prompt, GREEDY, key)
    pair.send(Unload(key=key))
    late = pair.submit(prompt, GREEDY, key)
    assert pair.result(rid).ids == undisturbed[2], "live requests finish on their weights"
    assert "late" in (pair.result(late).failed or "")
    _assert_empty(pair.inspect())
    assert all(slot.adapter != key for state in pair.inspect() for slot in state.slots)


def test_a_bad_file_is_refused_on_every_rank_and_serves_nobody(
    folder: Path, pair: Instance, tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    bad = shutil.copytree(folder / "a", tmp_path / "bad")
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    pair.send(Load(load_id=2, key=_key("bad", 2), path=str(bad)))
    for _, result in pair.wait_report(LoadResult, 2):
        assert result.cause is not None
        assert "adapter_model.safetensors" in result.cause
    pair.send(LoadAbort(load_id=2))
    refused = pair.submit(range(3, 9), GREEDY, _key("bad", 2))
    assert "bad" in (pair.result(refused).failed or "")
    assert [answer.ids for answer in pair.generate(_requests())] == undisturbed


def test_a_file_truncated_after_start_fails_its_requests_alone_and_names_rank_and_file(
    folder: Path, tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    adapters = {name: folder / name for name in NAMES}
    adapters["torn"] = shutil.copytree(folder / "a", tmp_path / "torn")
    # The CPU cache holds two adapters at start; "torn" comes fourth, so it is read at its first
    # use.
    config = _config(folder, 2, adapters)
    lora = {**config.engine.model_dump()["lora"], "max_cpu_loras": 2}
    with Instance(_config(folder, 2, adapters, lora=lora)) as instance:
        weights = adapters["torn"] / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        rids = [instance.submit(*request) for request in _requests()]
        torn = [instance.submit(range(3, 9), GREEDY, _key("torn")) for _ in range(3)]
        for rid in torn:
            failed = instance.result(rid).failed or ""
            assert "torn" in failed
            assert "rank" in failed
            assert str(weights) in failed
        assert [instance.result(rid).ids for rid in rids] == undisturbed
        states = instance.inspect()
        _assert_empty(states)
        (failed_read,) = states[0].failed_reads
        assert failed_read.adapter == _key("torn") and str(weights) in failed_read.cause
        assert f"rank {failed_read.rank}" in failed, "what the operator sees is what clients saw"
        for state in states:
            assert state.steps_waited_for_read == 0
            assert state.host is not None and state.host.peak <= state.host.capacity == 2


def test_weights_agreed_on_are_reported_with_their_digest(pair: Instance) -> None:
    pair.generate(_requests(count=4))
    digests: dict[str, str] = {}
    while not digests.keys() >= set(NAMES):
        ((_, report),) = pair.wait_report(AdapterDigest)
        digests.setdefault(report.key.name, report.digest)
    assert len({digests[name] for name in NAMES}) == 3


def test_a_bad_configured_adapter_stops_the_start_and_every_bad_one_is_named(
    folder: Path, tmp_path: Path
) -> None:
    adapters = {"a": folder / "a", "gone": tmp_path / "gone", "torn": tmp_path / "torn"}
    shutil.copytree(folder / "a", adapters["torn"])
    (adapters["torn"] / "adapter_config.json").write_text("{")
    with (
        pytest.raises(MstarError) as error,
        Instance(_config(folder, 2, adapters)),
    ):
        pytest.fail("the instance started")
    first = str(error.value).split("--- rank0.log")[0]
    assert "gone" in first
    assert "torn" in first
    assert "Traceback" not in str(error.value)
