"""Steps that replay captured graphs say what eager steps say, on every rank, whatever their rows.

Real engines, tables and steps of ranks as threads; ``recorded_graphs`` stands in for the device's
graphs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lockstep_ranks import LockstepRanks
from support.thread_group import dispatch_flags_restored

from mstar_tp.common.errors import LockstepError
from mstar_tp.config import EngineConfig, LoraConfig
from mstar_tp.engine.graphs.buckets import GraphKey, Kind, Variant
from mstar_tp.engine.graphs.device import Graph
from mstar_tp.engine.graphs.forwards import Captured, CapturedStep
from mstar_tp.engine.graphs.pieces import Pieces
from mstar_tp.engine.graphs.warm_up import capture_all, post_warmup_validate
from mstar_tp.layers.attention.attention import AttentionRow
from mstar_tp.layers.attention.paged_plan import PagedPlan, PlanBuffer
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

PARAMS = SamplingParams(max_tokens=30, temperature=0, logprobs=3)
PAGE = 4
EVERY_KEY = {
    GraphKey(*pair, variant)
    for pair in ((Kind.DECODE, 2), (Kind.DECODE, 4), (Kind.PIECES, 16), (Kind.PIECES, 32))
    for variant in Variant
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("graphs")
    # Sliding and full layers, norms of heads, a softcap: all that a family may have of its own.
    make_tiny_model(folder / "model", "gemma3", seed=5)
    for seed, (name, rank) in enumerate({"one": 4, "two": 16}.items()):
        make_adapter(folder / name, folder / "model", rank=rank, seed=seed)
    return folder


def start(folder: Path, world_size: int, *, graphs: bool) -> LockstepRanks:
    config = EngineConfig(
        model=str(folder / "model"),
        tensor_parallel_size=world_size,
        dtype="float32",
        threads=1,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=PAGE,
        num_kv_pages=40,
        graph_rows=(2, 4),
        graph_tokens=(16, 32),
        lora=LoraConfig(
            adapters={n: str(folder / n) for n in ("one", "two")}, max_loras=2, max_lora_rank=16
        ),
    )
    return LockstepRanks(config, graphs=graphs)


@pytest.fixture(scope="module")
def captured(folder: Path) -> Iterator[LockstepRanks]:
    """One rank, with graphs."""
    ranks = start(folder, 1, graphs=True)
    yield ranks
    ranks.close()


def open_rows(ranks: LockstepRanks, names: Sequence[str | None]) -> list[int]:
    rids = []
    for i, name in enumerate(names):
        key = None if name is None else AdapterKey(name, FIRST_GENERATION)
        rids.append(ranks.open(range(3 + i, 15 + 3 * i), PARAMS, key))
        assert key is None or ranks.wait_copies(rids[-1]) is None
    return rids


def tell(ranks: LockstepRanks, rows: Sequence[tuple[int, int]]) -> dict[int, Any]:
    results = ranks.step(rows)
    assert all(result.ended == results[0].ended for result in results)
    assert not results[0].failed
    return results[0].sampled


BATCHES: list[list[str | None]] = [
    ["one", None, "two", "one"],
    [None, None, None],
    ["two"],
    [None],
    [None, "two"],
]


def serve(ranks: LockstepRanks) -> list[dict[int, Any]]:
    """Prompts in chunks, then all rows decode; rows leave and their pages go to others."""
    said = []
    for names in BATCHES:
        rids = open_rows(ranks, names)
        lengths = [12 + 2 * i for i in range(len(rids))]
        said.append(tell(ranks, [(rid, 5) for rid in rids]))
        said.append(tell(ranks, [(rid, n - 5) for rid, n in zip(rids, lengths, strict=True)]))
        for left in range(len(rids), 0, -1):
            said += [tell(ranks, [(rid, 1) for rid in rids[:left]]) for _ in range(2)]
            ranks.remove(rids[left - 1])
    return said


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[GraphKey]:
    from mstar_tp.engine.graphs.forwards import CapturedForwards

    keys: Counter[GraphKey] = Counter()
    replay = CapturedForwards.replay

    def noted(self: CapturedForwards, step: CapturedStep) -> Any:
        keys[step.choice.key] += 1
        return replay(self, step)

    monkeypatch.setattr(CapturedForwards, "replay", noted)
    return keys


@pytest.mark.parametrize("world_size", [1, 2])
def test_replayed_steps_say_what_eager_steps_say(
    folder: Path, world_size: int, replayed: Counter[GraphKey]
) -> None:
    eager = start(folder, world_size, graphs=False)
    wanted = serve(eager)
    eager.close()
    ranks = start(folder, world_size, graphs=True)
    before = replayed.copy()
    got = serve(ranks)
    used = replayed - before
    assert set(used) == EVERY_KEY, "every graph was meant to run some step"
    for mine, theirs in zip(got, wanted, strict=True):
        assert [mine[rid].token for rid in mine] == [theirs[rid].token for rid in theirs]
        for rid, sampled in mine.items():
            assert sampled.logprobs.chosen == pytest.approx(theirs[rid].logprobs.chosen, abs=1e-4)
    ranks.close()


def kept(ranks: LockstepRanks) -> list[torch.Tensor]:
    return [part.clone() for cache in ranks.engines[0].model.kv for part in (cache.k, cache.v)]


def changed_pages(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[int]:
    """Pages that are other than before in some layer."""
    return {
        page
        for mine, other in zip(before, after, strict=True)
        for page in range(len(mine))
        if not torch.equal(mine[page].nan_to_num(7), other[page].nan_to_num(7))
    }


def shrink_a_batch(ranks: LockstepRanks) -> tuple[set[int], set[int]]:
    """Four rows decode, two leave, two go on in the graph of four: pages that the last step
    changed, and those of the two.
    """
    rids = open_rows(ranks, [None, "one", None, "two"])
    tell(ranks, [(rid, 12 + 3 * i - i) for i, rid in enumerate(rids)])
    tell(ranks, [(rid, 1) for rid in rids])
    for rid in rids[3:]:
        ranks.remove(rid)
    before = kept(ranks)
    tell(ranks, [(rid, 1) for rid in rids[:3]])
    mine = {page for rid in rids[:3] for page in ranks.engines[0].kv.table.held(rid)}
    changed = changed_pages(before, kept(ranks))
    for rid in rids[:3]:
        ranks.remove(rid)
    return changed, mine


def test_padding_keeps_nothing_anywhere(
    captured: LockstepRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, mine = shrink_a_batch(captured)
    assert changed <= mine
    # Were what is left over of a bucket not cleared, the row that left would still write its page.
    fill = PlanBuffer.fill

    def keep_the_rest(self: PlanBuffer, rows: Sequence[AttentionRow]) -> PagedPlan:
        before = self._device.clone()
        plan = fill(self, rows)
        if not plan.padded and len(rows) < self.sizes.rows:
            first = self._firsts[2] + len(rows)
            stop = self._firsts[2] + self.sizes.tokens
            self._device[first:stop] = before[first:stop]
        return plan

    monkeypatch.setattr(PlanBuffer, "fill", keep_the_rest)
    changed, mine = shrink_a_batch(captured)
    assert changed - mine, "a bucket that is not cleared goes unnoticed"


def test_a_base_only_graph_refuses_a_step_with_an_adapter_row(
    captured: LockstepRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rid,) = open_rows(captured, ["one"])
    lora = captured.engines[0].lora
    assert lora is not None
    with monkeypatch.context() as patch:
        patch.setattr(lora.decoder, "variant", lambda step: Variant.BASE)
        with pytest.raises(LockstepError, match="base-only"):
            captured.step([(rid, 12)])
    lora.decoder.deltas.end()
    captured.remove(rid)


def test_an_adapter_that_no_graph_holds_runs_eagerly_beside_the_others(
    captured: LockstepRanks, replayed: Counter[GraphKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = captured.engines[0].lora
    assert lora is not None
    rids = open_rows(captured, ["one", None])
    tell(captured, [(rid, 12 + 2 * i) for i, rid in enumerate(rids)])
    assert set(replayed) == {GraphKey(Kind.PIECES, 32, Variant.DELTAS)}
    monkeypatch.setattr(lora.decoder.weights, "can_capture", lambda slots: False)
    tell(captured, [(rid, 1) for rid in rids])
    tell(captured, [(rids[1], 1)])
    assert replayed.total() == 2
    assert replayed[GraphKey(Kind.DECODE, 2, Variant.BASE)] == 1
    for rid in rids:
        captured.remove(rid)


class FailingEnd:
    """A rank's captures, of which the third cannot be ended."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._left = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def end(self) -> Graph:
        graph: Graph = self._device.end()
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return graph


class AndOne:
    """A graph whose replay says something else than eager."""

    def __init__(self, graph: Graph, hidden: torch.Tensor) -> None:
        self._graph, self._hidden = graph, hidden

    def replay(self) -> None:
        self._graph.replay()
        self._hidden.add_(1)


def test_when_one_rank_cannot_capture_all_run_eagerly_and_say_which(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = start(folder, 2, graphs=True)
    forwards = [engine.graphs for engine in ranks.engines]
    assert forwards[0] is not None and forwards[1] is not None
    forwards[1].device = FailingEnd(forwards[1].device)

    def again(rank: int) -> bool:
        mine = forwards[rank]
        assert mine is not None
        return capture_all(mine, ranks.joint[rank], 40)

    with caplog.at_level(logging.WARNING), dispatch_flags_restored():
        assert ranks._on_all(again) == [False, False]
    told = [record.getMessage() for record in caplog.records]
    assert any("rank 1 could not capture" in t and "not permitted" in t for t in told)
    assert any("rank 1 could not capture" in t and "its own log" in t for t in told)

    # A replay that says something else on one rank: the same.
    caplog.clear()
    assert forwards[1] is not None
    forwards[1].device = forwards[1].device._device
    key = GraphKey(Kind.DECODE, 2, Variant.BASE)
    run, outputs = forwards[1].graphs[key].run, forwards[1].graphs[key].outputs
    assert not isinstance(run, Pieces)
    forwards[1].graphs[key] = Captured(AndOne(run, outputs.hidden), outputs)

    def validate(rank: int) -> bool:
        mine = forwards[rank]
        assert mine is not None
        return post_warmup_validate(mine, ranks.joint[rank], 40)

    assert ranks._on_all(validate) == [False, False]
    assert any("differs from the eager forward" in r.getMessage() for r in caplog.records)
    ranks.close()


def test_a_rank_that_ends_lets_every_graph_go(folder: Path) -> None:
    ranks = start(folder, 1, graphs=True)
    graphs = ranks.engines[0].graphs
    assert graphs is not None
    # NCCL waits, as a group is left, for every graph that holds one of its collectives.
    held = [
        weakref.ref(graph)
        for captured in graphs.graphs.values()
        for graph in (captured.run._graphs if isinstance(captured.run, Pieces) else [captured.run])
    ]
    assert len(held) > len(EVERY_KEY) and all(graph() for graph in held)
    del graphs
    ranks.close()
    assert not any(graph() for graph in held)
