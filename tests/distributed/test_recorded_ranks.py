"""What real ranks recorded, replayed: their very tables at any step, and where two of them differ.

Everything a recording can hold happens in one run: misses, evictions, a preemption, aborts, loads
and unloads, a read that fails, a row that ends early.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.instance import Instance

from mstar_tp.cli.main import main
from mstar_tp.common.errors import PeerLostError
from mstar_tp.config import ServeConfig, build_config
from mstar_tp.recording.reader import read_recording
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.tools.replay.replayer import Replayer
from mstar_tp.tools.replay.script import Script
from mstar_tp.wire.commands import Abort, Inspect, Load, LoadAbort, LoadCommit, Unload
from mstar_tp.wire.reports import LoadDone, LoadResult
from mstar_tp.wire.states import StateReport
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

DIVERGING = Path(__file__).with_name("diverging_rank.py")
NAMES = ("a", "b", "c", "torn")
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("replay")
    make_tiny_model(folder / "model", "llama", seed=7)
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, folder / "model", rank=4, seed=seed)
    return folder


def config(folder: Path, record: Path, **engine: Any) -> ServeConfig:
    tree = {
        "model": str(folder / "model"),
        "tensor_parallel_size": 2,
        "threads": 1,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_kv_pages": 17,
        "lora": {
            "adapters": {name: str(folder / name) for name in NAMES},
            "max_loras": 2,
            "max_cpu_loras": 3,
        },
        "record": str(record),
        **engine,
    }
    return build_config({"engine": tree}, source="test")


def key(name: str, generation: int = FIRST_GENERATION) -> AdapterKey:
    return AdapterKey(name, generation)


def submit(instance: Instance, count: int, *names: str | None) -> list[int]:
    return [
        instance.submit(range(3 + i, 12 + 2 * (i % 6)), GREEDY, key(name) if name else None)
        for i in range(count)
        for name in names
    ]


class Run(NamedTuple):
    base: Path
    inspected: list[list[StateReport]]

    def script(self, rank: int) -> Script:
        return Script(read_recording(self.base.with_name(f"{self.base.name}.rank{rank}")))


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "one-step"])
def run(folder: Path, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Run]:
    base = tmp_path_factory.mktemp("run") / "run.rec"
    weights = folder / "torn" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    inspected = []
    with Instance(config(folder, base, async_scheduling=request.param)) as instance:
        for rid in submit(instance, 1, "a", "b", "c"):
            instance.result(rid)
        # All come at once and none waits for its first read, so the pages run out.
        instance.hold(0)
        rids = submit(instance, 2, None, "a", "b", "c")
        doomed = submit(instance, 1, "a", None)
        instance.release(0)
        for rid in doomed:
            instance.send(Abort(rid=rid))
        for rid in rids:
            instance.result(rid)
        inspected.append(instance.inspect())
        weights.write_bytes(whole[: len(whole) // 2])
        assert "torn" in (instance.result(submit(instance, 1, "torn")[0]).failed or "")
        weights.write_bytes(whole)
        late = key("late", 1)
        for load_id, path in ((1, folder / "b"), (2, folder / "none")):
            name = late if load_id == 1 else key("none", 2)
            instance.send(Load(load_id=load_id, key=name, path=str(path)))
            instance.wait_report(LoadResult, 2)
        instance.send(LoadAbort(load_id=2))
        instance.send(LoadCommit(load_id=1))
        instance.wait_report(LoadDone)
        rids = [instance.submit(range(3, 9), GREEDY, late), *submit(instance, 1, "c", "a")]
        instance.send(Unload(key=late))
        for rid in rids:
            instance.result(rid)
        inspected.append(instance.inspect())
    assert inspected[0][0].preemptions > 0, "the pages were meant to run out"
    assert inspected[0][0].kv_host.offloads > 0
    yield Run(base, inspected)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_hash_of_every_table_is_rebuilt_at_every_step(run: Run, rank: int) -> None:
    script = run.script(rank)
    replayer = Replayer(script)
    checked = dict.fromkeys(("cpu_cache", "served", "slots", "pages"), 0)
    while (replayed := replayer.advance()) is not None:
        assert replayed.departed is None
        for table in checked:
            # The rank's own, computed then; the leader's of tier and served ride in its step.
            checked[table] += replayed.recorded[table] == replayed.rebuilt[table]
        replayer.run(replayed)
    assert script.num_steps > 30
    assert set(checked.values()) == {script.num_steps}
    assert script.recording.note is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rebuilt_tables_are_those_that_the_ranks_reported(run: Run, rank: int) -> None:
    """At each inspection's place in the order, against what the rank said of itself then."""
    replayer = Replayer(run.script(rank))
    reports = iter(run.inspected)
    apply = replayer.state.apply
    seen = 0

    def inspecting(message: Any) -> str | None:
        nonlocal seen
        cause = apply(message)
        if isinstance(message, Inspect):
            seen += 1
            report = next(reports)[rank]
            state = replayer.state.report(
                0, waiting=0, running=0, steps=report.steps, preemptions=0, gap_us=0
            )
            for field in ("requests", "pages_used", "pages_total", "slots", "cpu_cache"):
                assert getattr(state, field) == getattr(report, field), field
            for table in ("slots", "pages", "cpu_cache", "served"):
                assert getattr(state.checks, table) == getattr(report.checks, table), table
        return cause

    replayer.state.apply = inspecting  # type: ignore[method-assign]
    while (replayed := replayer.advance()) is not None:
        replayer.run(replayed)
    assert seen == 2


def replay(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["replay", *argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_ranks_of_one_run_are_found_the_same(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replay(capsys, str(run.base), "--compare", f"{run.base}.rank1")
    steps = run.script(0).num_steps
    assert code == 0
    assert text.endswith(f"the two recordings are the same: {steps} steps\n")


def test_a_step_is_shown_with_the_tables_before_and_after_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replay(capsys, f"{run.base}.rank1", "--step", "2", "--json")
    view = json.loads(text)["view"]
    assert code == 0
    assert view["step"] == 2
    assert (
        {"cpu_cache", "served", "slots", "pages", "tokens"}
        == set(view["before"])
        == set(view["after"])
    )
    computed = {row["rid"]: row["num_computed"] for row in view["before"]["tokens"]}
    after = {row["rid"]: row["num_computed"] for row in view["after"]["tokens"]}
    for rid, count in view["rows"]:
        assert after[rid] == computed[rid] + count
    code, text = replay(capsys, str(run.base), "--step", "2")
    assert code == 0
    assert "tables as step 2 begins" in text and "tables as step 2 ends" in text
    assert re.search(r"slot 1: [abc]#0, held by \d", text)
    assert "slots: the adapter in each slot of the device, and which requests hold it (0x" in text
    code, text = replay(capsys, str(run.base), "--step", "9999")
    assert code == 1 and "step 9999 cannot be rebuilt" in text


def test_recordings_hold_no_prompt_and_no_token(run: Run) -> None:
    for rank in (0, 1):
        for timed in run.script(rank).recording.entries:
            assert not {"prompt", "tokens", "sampled"}.intersection(timed.entry.__struct_fields__)


def test_a_cut_recording_is_compared_as_far_as_it_goes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(f"{run.base}.rank1").read_bytes()
    cut, torn = tmp_path / "cut", []
    for size in (len(data) // 2, len(data) // 2 + 1):  # one of the two is not a frame's end
        cut.write_bytes(data[:size])
        code, text = replay(capsys, str(run.base), "--compare", str(cut))
        assert code == 0
        torn += re.findall(
            r"compared as far as both go: .*cut ends after \d+ steps: the last \d+ bytes", text
        )
    assert torn


@pytest.fixture(scope="module")
def killed(folder: Path, tmp_path_factory: Any) -> Path:
    """A run whose follower was killed."""
    base: Path = tmp_path_factory.mktemp("killed") / "killed.rec"
    with pytest.raises(PeerLostError, match="rank 1"), Instance(config(folder, base)) as instance:
        try:
            for rid in submit(instance, 2, "a", "b"):
                instance.result(rid)
            while Script(read_recording(Path(f"{base}.rank1"))).num_steps < GREEDY.max_tokens:
                pass  # its writer takes what milliseconds it gets
            instance.ranks.processes[1].send_signal(signal.SIGKILL)
            instance.result(submit(instance, 1, "a")[0])
        finally:
            instance.ranks.processes[0].wait(60)
    return base


def test_another_run_differs_at_its_first_other_entry(
    run: Run, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replay(capsys, str(run.base), "--compare", str(killed))
    assert code == 1
    found = re.search(r"first difference: step (\d+), order", text)
    assert found is not None, text
    lines = text[found.end() :].splitlines()
    halves = lines[lines.index(next(line for line in lines if "killed" in line)) :]
    assert any("Opened" in line or "Step" in line for line in halves)


def test_a_killed_rank_leaves_a_recording_that_replays_to_its_last_whole_step(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replay(capsys, f"{killed}.rank1", "--compare", f"{killed}.rank0")
    assert code == 0, text
    assert "its rank was killed: there is no end" in text or "are left out" in text
    assert int(re.findall(r"the same: (\d+) steps", text)[0]) >= GREEDY.max_tokens


def test_a_follower_that_diverges_stops_the_instance_and_the_recordings_name_the_same_step(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its step thread finds it; for every table: ``lockstep/test_replayed_instances.py``."""
    base, table = tmp_path / "split.rec", "slots"
    split = config(folder, base, num_kv_pages=64)
    with pytest.raises(PeerLostError) as stopped, Instance(split, before=DIVERGING) as instance:
        try:
            for rid in submit(instance, 3, "a", "b"):
                instance.result(rid)
            pytest.fail("the instance served on")
        finally:
            # It has said why: whoever supervises it may kill it now. The leader ends by itself.
            instance.ranks.processes[1].kill()
            instance.ranks.processes[0].wait(60)
    named = re.search(r"rank 1 step (\d+): its table of (\w+) differs", str(stopped.value))
    assert named is not None, stopped.value
    assert named[2] == table
    step = int(named[1])
    assert 4 <= step <= 8
    code, text = replay(capsys, f"{base}.rank0", "--compare", f"{base}.rank1")
    assert code == 1
    assert f"first difference: step {step}, {table}" in text
    code, text = replay(capsys, f"{base}.rank1")
    assert code == 1
    assert f"step {step}: the rank's table of {table} is not what the order makes of it" in text
    assert "as the rank had it" in text
