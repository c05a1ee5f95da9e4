"""With tokens that stay on the device while the next step is launched, ranks stay one and every
request gets its own tokens, once: also where some ranks hear of a step's tokens sooner than others,
where rows end meanwhile, and where a row needs the host to be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lockstep_ranks import LockstepRanks
from support.thread_instance import ThreadInstance
from test_overlap import Watched, refuse, spoil_logits
from test_replayed_instances import check_replays, recorded
from trails import check_rest
from troubles import NAMES, Faults

from mstar_tp.config import EngineConfig
from mstar_tp.engine.sampling.device_sampling import needs_host, sample_on_device
from mstar_tp.engine.sampling.sampler import Sampled, SampleRow, sample
from mstar_tp.engine.scheduling.requests import NO_TOKEN
from mstar_tp.testing.tiny_models import make_tiny_model
from mstar_tp.wire.values import Grammar, SamplingParams


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(**options: Any) -> Watched:
        watched = Watched(tmp_path, deferred=True, **options)
        made.append(watched)
        watched.instance.start()
        watched.let()
        return watched

    yield start
    for watched in made:
        watched.instance.close()


def test_a_row_that_stops_runs_once_more_on_every_rank_and_nothing_comes_of_it(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    stops = watched.instance.submit(None, 1, max_tokens=5, stop_token_ids=(0,))
    goes_on = watched.instance.submit(None, 1, max_tokens=5)
    watched.let()
    assert watched.named(stops) == [0, 1]
    assert [watched.ran(stops, rank) for rank in (0, 1)] == [2, 2]
    assert [rid for _, rid in watched.tokens].count(stops) == 1
    endings = watched.instance.endings
    assert (endings[stops].how, endings[goes_on].how) == ("stop", "length")
    assert endings[goes_on].tokens == 5
    check_rest(watched.instance)


def test_a_row_that_fails_fails_once_and_the_others_go_on(watch: Callable[..., Watched]) -> None:
    watched = watch()
    spoil_logits(watched, step=1, row=0)
    fails = watched.instance.submit(None, 1, max_tokens=5)
    goes_on = watched.instance.submit(None, 1, max_tokens=5)
    watched.let()
    assert watched.failed == [fails]
    assert watched.instance.endings[goes_on].tokens == 5
    check_rest(watched.instance)


def test_the_next_step_is_launched_before_the_tokens_of_the_one_before_it_are_there(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    watched.instance.submit(None, 2, max_tokens=6)
    watched.let("step-1")
    watched.instance.ranks[0].waker.wake()
    watched.let("step-1")
    rank = watched.instance.ranks[0]
    ahead: dict[int, bool] = {}
    launch = rank.runner._tables.launch

    def noted(step: Any) -> None:
        ahead[step.tp_seq] = rank._done < step.tp_seq - 1
        launch(step)

    rank.runner._tables.launch = noted  # type: ignore[method-assign]
    watched.let()
    assert ahead[1], "step 1, which waited behind step 0, was launched after its tokens came"
    check_rest(watched.instance)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_storms_with_refused_steps_leave_all_ranks_one(
    tmp_path: Path, world_size: int, seed: int
) -> None:
    instance = ThreadInstance(
        tmp_path,
        world_size=world_size,
        slots=2,
        cpu_capacity=3,
        num_pages=6,
        num_host_pages=3 * seed,
        fine=seed % 2 == 1,
        deferred=True,
    )
    try:
        if seed:
            refuse(instance, lambda step: (step.tp_seq * 7 + seed) % 5 == 0)
        instance.start(*NAMES[:4])
        troubles = Faults(instance)
        troubles.stress(seed, requests=40)
        troubles.check()
    finally:
        instance.close()


def test_a_recording_is_replayed_as_it_ran(tmp_path: Path) -> None:
    with recorded(tmp_path, num_pages=6, num_host_pages=4, deferred=True) as instance:
        troubles = Faults(instance)
        troubles.stress(5, requests=30)
        troubles.check()
    check_replays(tmp_path, instance)


# ---------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("deferred") / "model", "qwen2", seed=5)


ROWS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
OFFLOADED, OFFLOADED_AT = (0, 2), 7
ON_HOST = [
    {"temperature": 1.0, "seed": 6, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": ((7, 30.0),)},
    {"temperature": 1.0, "seed": 9, "min_tokens": 3, "stop_token_ids": tuple(range(0, 200, 2))},
]


@pytest.mark.parametrize(("world_size", "graphs"), [(1, False), (2, True)])
def test_every_way_of_sampling_gives_the_tokens_of_steps_that_wait(
    model: Path, world_size: int, graphs: bool
) -> None:
    config = EngineConfig(
        model=str(model),
        tensor_parallel_size=world_size,
        dtype="float32",
        threads=1,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=4,
        num_kv_pages=64,
        kv_offloading_size=0.01,
        graph_rows=(8,),
        graph_tokens=(128,),
    )
    waits = serve(LockstepRanks(config), [*ROWS, *ON_HOST], launched=False)
    ranks = LockstepRanks(config, graphs=graphs, deferred=True)
    # The longer all rows are sampled on the device, the more steps are launched ahead.
    assert serve(ranks, [*ROWS, *ON_HOST], launched=True) == waits


def serve(
    ranks: LockstepRanks, rows: list[dict[str, Any]], *, launched: bool
) -> dict[int, list[Any]]:
    """What each row got, by steps that wait for each other or are launched ahead. Of some of the
    latter's rows, KV moves to host memory on the way.
    """
    try:
        said: dict[int, list[Any]] = {}
        left: dict[int, int] = {}
        next_tokens: dict[int, int] = {}
        for i, settings in enumerate(rows):
            # Those that need the host end first.
            most = 12 if i < len(ROWS) else 4 + i % 2
            rid = ranks.open(range(3 + i, 12 + 2 * i), SamplingParams(max_tokens=most, **settings))
            said[rid], left[rid], next_tokens[rid] = [], most, 9 + i
        live = set(said)
        for turn in count():
            if not live:
                break
            offloads = launched and turn == OFFLOADED_AT
            rids = [] if offloads else [rid for rid in said if rid in live and left[rid]]
            step = [(rid, next_tokens[rid]) for rid in rids]
            for rid in rids:
                left[rid] -= 1
                next_tokens[rid] = 1
            if not step:
                results = ranks.flush()
            elif launched:
                results = ranks.launch(step)
            else:
                results = [[result] for result in ranks.step(step)]
            assert all(
                [result.ended for result in each] == [result.ended for result in results[0]]
                for each in results
            )
            for result in results[0]:
                assert not result.failed
                for rid, sampled in result.sampled.items():
                    said[rid].append(sampled.token)
                live -= set(result.ended)
            if offloads:
                for rid in OFFLOADED:
                    ranks.offload(rid)
        assert ranks.engines[0].kv.kept.reloads == len(OFFLOADED) * launched
        return said
    finally:
        ranks.close()


def test_the_device_draws_what_the_host_draws() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 300) * 3
    logits[7, 5] = float("nan")
    logits[9] = float("-inf")
    rows = [
        SamplingParams(
            max_tokens=9,
            temperature=(0.0, 0.7, 1.5)[i % 3],
            top_k=(0, 5, 1000, 1)[i % 4],
            top_p=(1.0, 0.8, 0.05)[i % 5 % 3],
            min_p=(0.0, 0.1)[i % 7 % 2],
            seed=1000 + i,
        )
        for i in range(40)
    ]
    wanted = [
        drawn.token if isinstance(drawn, Sampled) else NO_TOKEN
        for drawn in sample(
            logits,
            [SampleRow(params=p, tokens=[1] * (i + 2), prompt_len=1) for i, p in enumerate(rows)],
        )
    ]
    got = sample_on_device(logits, [(params, i + 2) for i, params in enumerate(rows)])
    assert got.tolist() == wanted
    assert wanted[7] == wanted[9] == NO_TOKEN
    for part in ([0, 3], [1, 4]):  # all greedy, all drawn
        some = sample_on_device(logits[part], [(rows[i], i + 2) for i in part])
        assert some.tolist() == [wanted[i] for i in part]


def test_rows_that_the_host_must_sample_are_told_by_their_parameters_and_length() -> None:
    def params(**settings: Any) -> SamplingParams:
        return SamplingParams(max_tokens=9, **settings)

    assert not needs_host(params(temperature=0.7, top_k=3, seed=2), 0)
    assert needs_host(params(logprobs=0), 5)
    assert needs_host(params(presence_penalty=0.1), 5)
    assert needs_host(params(logit_bias=((3, 1.0),)), 5)
    assert needs_host(params(grammar=Grammar(kind="json_schema", text="{}", field="f")), 5)
    banned = params(min_tokens=3, stop_token_ids=(1,))
    assert [needs_host(banned, n) for n in range(5)] == [True, True, True, False, False]
    assert not needs_host(params(min_tokens=3), 0)
