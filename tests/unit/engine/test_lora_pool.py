"""A pool's plan is current for its own step and thread only, reads end on reader threads whatever
happens to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from mstar_tp.common.errors import AdapterError, LockstepError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.lora.pool import CopyState, LoraAdapterPool
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

P, Q = AdapterKey("p", 1), AdapterKey("q", 1)
QKV = "self_attn.qkv_proj"
MakePool = Callable[..., LoraAdapterPool]


@pytest.fixture
def landed() -> SimpleQueue[CopyIn]:
    return SimpleQueue()


@pytest.fixture
def make_pool(landed: SimpleQueue[CopyIn]) -> Iterator[MakePool]:
    torch.set_num_threads(1)
    pools: list[LoraAdapterPool] = []

    def make(spec: LoraSpec | None = None, read_timeout_s: float = 60.0) -> LoraAdapterPool:
        pool = LoraAdapterPool(
            spec or tiny_spec(),
            device="cpu",
            groups=JointGroups(SingleGroup()),
            dtype=torch.float32,
            decides=True,
            report=landed.put,
            read_timeout_s=read_timeout_s,
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool: MakePool, landed: SimpleQueue[CopyIn], tmp_path: Path) -> LoraAdapterPool:
    """Serves p; request 0 runs on it, request 1 on the base."""
    pool = make_pool()
    pool.loads.preload([(P, str(write_adapter(tmp_path / "p", q_pairs(pool.spec))))])
    pool.copy_in(landed.get(timeout=30))
    pool.ingest_request(0, LoraReqConfig(P))
    pool.ingest_request(1, LoraReqConfig(None))
    assert pool.admit(step(0, 0, 1)).failed == {}
    return pool


def step(tp_seq: int, *rids: int) -> StepBatch:
    rows = tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in rids)
    return StepBatch(tp_seq=tp_seq, rows=rows)


def test_a_delta_adds_to_adapter_rows_of_the_planned_step_only(pool: LoraAdapterPool) -> None:
    delta = pool.deltas.layer_delta(QKV, 1)
    pool.plan(step(1, 1, 0))
    y = delta(torch.zeros(2, 16), torch.ones(2, 8))
    assert not y[0].any()
    torch.testing.assert_close(y[1, :8], torch.full((8,), 0.32))
    assert not y[1, 8:].any()


def test_a_step_without_adapter_rows_returns_y_itself(pool: LoraAdapterPool) -> None:
    pool.plan(step(1, 1))
    y = torch.zeros(1, 16)
    # x of a wrong width: any work on it would raise.
    assert pool.deltas.layer_delta(QKV, 0)(y, torch.empty(1, 0)) is y


@pytest.mark.parametrize("end", ["before", "commit", "rollback"])
def test_a_delta_without_a_plan_refuses(pool: LoraAdapterPool, end: str) -> None:
    delta = pool.deltas.layer_delta(QKV, 0)
    batch = step(1, 0)
    if end != "before":
        pool.plan(batch)
        (pool.commit if end == "commit" else pool.rollback_admit)(batch)
    with pytest.raises(LockstepError, match="no step is planned"):
        delta(torch.zeros(1, 16), torch.ones(1, 8))


def test_a_delta_on_a_thread_that_did_not_plan_refuses(pool: LoraAdapterPool) -> None:
    pool.plan(step(1, 0))
    delta, errors = pool.deltas.layer_delta(QKV, 0), []

    def other() -> None:
        try:
            delta(torch.zeros(1, 16), torch.ones(1, 8))
        except LockstepError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other, name="stranger")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread stranger" in errors[0]


def test_base_only_adds_nothing_and_gives_the_plan_back(pool: LoraAdapterPool) -> None:
    delta = pool.deltas.layer_delta(QKV, 0)
    pool.plan(step(1, 0))
    with pool.deltas.base_only():
        assert not delta(torch.zeros(1, 16), torch.ones(1, 8)).any()
    assert delta(torch.zeros(1, 16), torch.ones(1, 8)).any()


def test_a_read_past_its_deadline_is_a_failure_and_its_late_copy_is_thrown_away(
    make_pool: MakePool, landed: SimpleQueue[CopyIn], tmp_path: Path
) -> None:
    pool = make_pool(read_timeout_s=0.0)
    gate, read = threading.Event(), pool.store.read

    def slow(*args: object) -> object:
        gate.wait(60)
        return read(*args)  # type: ignore[arg-type]

    pool.store.read = slow  # type: ignore[method-assign, assignment]
    pool.loads.preload([(P, str(write_adapter(tmp_path / "p", q_pairs(pool.spec))))])
    report = landed.get(timeout=30)
    assert report.cause is not None and "within 0 s" in report.cause
    gate.set()
    pool.copy_in(report)
    assert pool.failed_copies() and pool.store.get(P) is None


def test_any_error_of_a_reader_is_a_report_and_the_next_read_runs(
    make_pool: MakePool, landed: SimpleQueue[CopyIn], tmp_path: Path
) -> None:
    pool = make_pool()
    read = pool.store.read

    def broken(key: AdapterKey, *rest: object) -> object:
        if key == P:
            raise MemoryError
        return read(key, *rest)  # type: ignore[arg-type]

    pool.store.read = broken  # type: ignore[method-assign, assignment]
    pairs = q_pairs(pool.spec)
    pool.loads.preload([(key, str(write_adapter(tmp_path / key.name, pairs))) for key in (P, Q)])
    reports = {r.key: r for r in (landed.get(timeout=30), landed.get(timeout=30))}
    assert "memory" in str(reports[P].cause) and reports[Q].cause is None


def test_reads_go_on_where_a_reader_thread_may_not_choose_its_cpus(
    make_pool: MakePool,
    landed: SimpleQueue[CopyIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused, raising=False)
    pool = make_pool()
    folder = str(write_adapter(tmp_path / "p", q_pairs(pool.spec)))
    for key in (P, Q):  # an executor whose initializer raised would refuse the second outright
        pool.loads.preload([(key, folder)])
        assert landed.get(timeout=30).cause is None


def test_a_read_that_no_thread_can_run_fails_by_itself(
    make_pool: MakePool,
    landed: SimpleQueue[CopyIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool()

    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool.fetches.readers._readers, "_spawn", no_thread)  # type: ignore[attr-defined]
    pool.loads.preload([(P, str(write_adapter(tmp_path / "p", q_pairs(pool.spec))))])
    cause = landed.get(timeout=30).cause
    assert cause is not None and "'p'" in cause and "can't start new thread" in cause


def test_reads_that_hang_on_every_reader_hold_up_no_other(
    make_pool: MakePool, landed: SimpleQueue[CopyIn], tmp_path: Path
) -> None:
    pool = make_pool()
    pool.fetches.readers._readers._slow_s = 0.0  # type: ignore[attr-defined]
    gate, read = threading.Event(), pool.store.read

    def hangs(key: AdapterKey, *rest: object) -> object:
        if key.name != "free":
            gate.wait(60)
        return read(key, *rest)  # type: ignore[arg-type]

    pool.store.read = hangs  # type: ignore[method-assign, assignment]
    folder = str(write_adapter(tmp_path / "p", q_pairs(pool.spec)))
    names = ("stuck-1", "stuck-2", "stuck-3", "free")
    try:
        pool.loads.preload([(AdapterKey(name, 1), folder) for name in names])
        report = landed.get(timeout=30)
        assert (report.key.name, report.cause) == ("free", None)
    finally:
        gate.set()


def test_a_load_is_checked_on_a_thread_of_its_own_and_keeps_no_copy(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    answers: SimpleQueue[tuple[str | None, int, tuple[str, ...], str]] = SimpleQueue()

    def done(cause: str | None, rank: int, targets: tuple[str, ...]) -> None:
        answers.put((cause, rank, targets, threading.current_thread().name))

    folder = write_adapter(tmp_path / "p", q_pairs(pool.spec))
    pool.loads.begin(P, str(folder), done)
    cause, rank, targets, thread = answers.get(timeout=30)
    assert (cause, rank, targets) == (None, 2, (QKV,)) and thread.startswith("lora-check")
    assert pool.ingest_request(5, LoraReqConfig(P)) is not None, "not servable before its commit"
    assert pool.loads.commit(P, str(folder)) is None
    assert pool.reports.debug_state().cpu_cache == ()
    pool.loads.begin(Q, str(tmp_path / "nowhere"), done)
    assert "nowhere" in str(answers.get(timeout=30)[0])


def test_checks_that_hang_keep_no_read_waiting(
    make_pool: MakePool,
    landed: SimpleQueue[CopyIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool()
    folder = str(write_adapter(tmp_path / "p", q_pairs(pool.spec)))
    checked, gate = threading.Event(), threading.Event()
    pool.loads.begin(P, folder, lambda *_: checked.set())
    assert checked.wait(30)
    assert pool.loads.commit(P, folder) is None
    monkeypatch.setattr(pool.store, "check", lambda *_: gate.wait(60))
    for n in range(4):
        pool.loads.begin(AdapterKey("stuck", n), "anywhere", lambda *_: None)
    pool.ingest_request(0, LoraReqConfig(P))
    try:
        assert landed.get(timeout=120).cause is None
    finally:
        gate.set()


def test_a_check_past_its_deadline_is_answered_once_and_its_late_result_is_ignored(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(read_timeout_s=0.0)
    gate, check = threading.Event(), pool.store.check
    answers: SimpleQueue[str | None] = SimpleQueue()

    def slow(name: str, path: str) -> object:
        gate.wait(60)
        return check(name, path)

    monkeypatch.setattr(pool.store, "check", slow)
    folder = str(write_adapter(tmp_path / "p", q_pairs(pool.spec)))
    pool.loads.begin(P, folder, lambda cause, *_: answers.put(cause))
    assert "'p' was not checked within 0 s" in str(answers.get(timeout=30))
    gate.set()
    pool.close()
    for thread in threading.enumerate():
        if thread.name.startswith("lora-check"):
            thread.join(30)
    assert answers.empty()
    with pytest.raises(LockstepError, match="never accepted"):
        pool.loads.commit(P, folder)


def test_a_config_that_is_a_pipe_is_refused_and_waits_for_no_writer(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    folder = write_adapter(tmp_path / "p", q_pairs(pool.spec))
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    answers: SimpleQueue[str | None] = SimpleQueue()
    pool.loads.begin(P, str(folder), lambda cause, *_: answers.put(cause))
    assert "adapter_config.json: is not a regular file" in str(answers.get(timeout=20))


def test_a_bad_configured_adapter_stops_the_start_and_all_are_named(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    good = write_adapter(tmp_path / "p", q_pairs(pool.spec))
    with pytest.raises(AdapterError, match=r"'q'[^\n]*\n[^\n]*'r'"):
        pool.loads.preload(
            [(P, str(good)), (Q, str(tmp_path / "q")), (AdapterKey("r", 1), str(tmp_path / "r"))]
        )


def test_after_start_the_first_configured_adapters_are_held_in_order(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    keys = [AdapterKey(f"a{i}", 1) for i in range(6)]
    folder = str(write_adapter(tmp_path, q_pairs(pool.spec)))
    pool.loads.preload([(key, folder) for key in keys])
    assert pool.reports.debug_state().cpu_cache == tuple(keys[:4])
    assert pool.reports.debug_state().served == tuple(keys)
    pool.post_warmup_validate()


def test_ingest_and_remove_are_idempotent_and_leave_nothing(pool: LoraAdapterPool) -> None:
    pool.ingest_request(0, LoraReqConfig(P))
    assert pool.request_state(0) is CopyState.IN
    for _ in range(2):
        pool.remove_request(0)
        pool.remove_request(1)
    pool.post_warmup_validate()
    assert all(slot.holders == () for slot in pool.reports.debug_state().slots)


def test_unloading_two_hundred_adapters_leaves_what_one_leaves(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    folder = str(write_adapter(tmp_path, q_pairs(pool.spec)))
    done: SimpleQueue[str | None] = SimpleQueue()
    for generation in range(200):
        key = AdapterKey("x", generation)
        pool.loads.begin(key, folder, lambda cause, rank, targets: done.put(cause))
        assert done.get(timeout=30) is None and pool.loads.commit(key, folder) is None
        pool.ingest_request(generation, LoraReqConfig(key))
        pool.remove_request(generation)
        assert pool.loads.unload(key)
        pool.loads.forget()
    state = pool.reports.debug_state()
    assert state.cpu_cache == () and state.served == ()
    tables = pool.tables
    assert not len(tables.adapters) and not tables.registry._loads
    assert not tables.copies._copies and not tables.cpu_cache._key_of


# ------------------------------------------------------------------------------------- binding
