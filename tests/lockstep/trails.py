"""What ranks applied, compared with each other and with the brute-force pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brute_pool import BrutePool
from support.code_model import HIDDEN
from support.thread_instance import LARGE, ThreadInstance
from support.thread_rank import Event, ThreadRank

from mstar_tp.wire.commands import Load, LoadAbort, LoadCommit, NewRequest, Unload
from mstar_tp.wire.values import AdapterKey

BETWEEN_ADMITS = ("admit", "rollback_admit", "remove", "drop_copy", "forget_retired")
ONE_ORDER = ("apply", "remove", "drop_copy", "forget_retired")
"""Preemptions show in the page tables' trails: the leader makes its own while it plans."""


def check_events(instance: ThreadInstance) -> None:
    """Every rank went through one order of messages, and one order of admits and removes; the
    brute-force pool predicts what each of them did.
    """
    ranks = instance.ranks
    for stage in range(len(instance.specs)):
        for rank in ranks[1:]:
            for kinds in (BETWEEN_ADMITS, ONE_ORDER):
                assert _told(rank, stage, kinds) == _told(ranks[0], stage, kinds), (
                    f"rank {rank.rank} went another way in node {stage}"
                )
        for rank in ranks:
            replay(instance, rank, stage)


def _told(rank: ThreadRank, stage: int, kinds: tuple[str, ...]) -> list[Any]:
    """What is equal on all ranks of the events of these kinds. A load's path differs by rank here,
    and so may the wording of a cause.
    """
    told: list[Any] = []
    for event in rank.events_by_stage[stage]:
        if event.kind not in kinds:
            continue
        if event.kind == "admit":
            assert event.outcome is not None
            told.append((event.detail, set(event.outcome.failed), event.outcome.refused))
        elif event.kind == "apply" and isinstance(event.detail[0], Load):
            told.append(event.detail[0].load_id)
        elif event.kind != "rollback_admit":
            told.append((event.kind, event.detail))
    return told


def replay(instance: ThreadInstance, rank: ThreadRank, stage: int = -1) -> None:
    """Every decision of one rank about one node's slots and tier, predicted."""
    spec = instance.specs[stage]
    pool = BrutePool(spec.slots, spec.cpu_capacity, _cost_of(instance))
    changing = [key for key in instance.configured if instance.changes(key, stage)]
    pool.preload(
        instance.configured, changing, [key for key in changing if instance.limits_of(key).pinned]
    )
    loads: dict[int, AdapterKey] = {}
    for number, event in enumerate(rank.events_by_stage[stage]):
        where = f"rank {rank.rank}, node {stage}, event {number}: {event.kind} {event.detail}"
        if event.kind == "admit":
            asked = [(rid, instance.asks(rid, key, stage)) for rid, key in event.detail]
            _predict_admit(instance, pool, event, asked, where)
        else:
            _apply(instance, stage, pool, loads, event)
        if event.slots is not None:
            assert event.slots == pool.slots(), where
        if event.kind not in ("admit", "rollback_admit"):
            assert event.cpu_cache == pool.held(), where


def _cost_of(instance: ThreadInstance) -> Callable[[Any], int]:
    """By hand: float32, one layer, max rank 4, and 2 rows of each of q, k and v a rank."""
    if instance.spec.cpu_unit == "adapters":
        return lambda key: 1
    qkv = 4 * (3 * 4 * HIDDEN + 3 * 2 * 4)
    out = 4 * (4 * 2 + HIDDEN * 4)
    return lambda key: qkv + out * (key.name in LARGE)


def _predict_admit(
    instance: ThreadInstance, pool: BrutePool, event: Event, asked: list[Any], where: str
) -> None:
    """Which copies had failed is what the reads say; all else follows."""
    assert event.outcome is not None, f"{where}: never ended"
    resident = set(pool.keys)
    rows_of = {key for rid, key in asked if rid in event.outcome.failed}
    bad = {key for key in rows_of if key not in resident}
    assert bad <= instance.bad_reads, f"{where}: failed, though its reads did not"
    failed, refused = pool.admit(asked, bad)
    assert set(event.outcome.failed) == failed, where
    assert (event.outcome.refused is not None) == refused, where


def _apply(
    instance: ThreadInstance,
    stage: int,
    pool: BrutePool,
    loads: dict[int, AdapterKey],
    event: Event,
) -> None:
    match event.kind:
        case "apply" if isinstance(event.detail[0], NewRequest):
            message = event.detail[0]
            if message.adapter is None or message.adapter in pool.served:
                pool.ingest(message.rid, instance.asks(message.rid, message.adapter, stage))
            else:
                pool.ingest(message.rid, message.adapter)
        case "apply":
            _apply_message(instance, pool, loads, event.detail[0])
        case "remove":
            pool.remove(*event.detail)
        case "drop_copy" if instance.specs[event.detail[0].stage] is instance.specs[stage]:
            pool.drop(event.detail[0].key, event.detail[0].fetch_no)
        case "forget_retired":
            pool.forget_retired()
        case "rollback_admit":
            pool.rollback()


def _apply_message(
    instance: ThreadInstance, pool: BrutePool, loads: dict[int, AdapterKey], message: Any
) -> None:
    match message:
        case Load(load_id=load_id, key=key):
            loads[load_id] = key
        case LoadAbort(load_id=load_id):
            loads.pop(load_id, None)
        case LoadCommit(load_id=load_id, replaces=replaces):
            key = loads.pop(load_id)
            same = [served for served in pool.served if served.name == key.name]
            pinned = instance.limits_of(key).pinned
            others = {other.name for other in pool.pins if other.name != key.name}
            if (not same or replaces in same) and not (
                pinned and len(others) + 1 >= len(pool.keys)
            ):
                pool.serve(key, pinned)
        case Unload(key=key):
            pool.unload(key)


def check_rest(instance: ThreadInstance) -> None:
    """At rest: nobody waits for ever, nothing is left, and every table is the same on all ranks."""
    assert not instance.live, f"requests {sorted(instance.live)} wait for ever"
    leader = instance.ranks[0]
    for rank in instance.ranks:
        where = f"rank {rank.rank}"
        assert len(rank.requests) == 0, where
        assert rank.kv.table.num_used == 0, where
        assert rank.kv.kept.host.num_used == 0 and not rank.kv.kept._leaving, where
        assert rank.kv.history() == leader.kv.history(), where
        assert rank.kv.kept.state() == leader.kv.kept.state(), where
        assert rank.requests._history.value() == leader.requests._history.value(), where
        assert rank.lora.reports.served_hash() == leader.lora.reports.served_hash(), where
        assert rank.lora.reports.steps_waited_for_read == 0, f"{where}: a step waited for a read"
        for pool in rank.lora.pools:
            pool.post_warmup_validate()
        for pool, leaders in zip(rank.lora.pools, leader.lora.pools, strict=True):
            assert pool.reports.slots_hash() == leaders.reports.slots_hash(), where
            assert pool.reports.cpu_cache_hash() == leaders.reports.cpu_cache_hash(), where
            assert pool.reports.debug_state() == leaders.reports.debug_state(), where
            tables = pool.tables
            assert not tables.dead and not tables.claims, where
            assert not tables.cpu_cache.failed_requests(), where
            assert pool.store.num_copies <= len(pool.store.cpu_cache), where
    assert leader.loop._scheduler.num_running == 0  # type: ignore[union-attr]
    check_events(instance)
