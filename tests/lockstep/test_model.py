"""The lockstep protocol, explored over all interleavings up to the bounds of each configuration:
nothing is wrong with it, and with each refuted variant something is, which the search finds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model import Model, State
from model_cases import REFUTED, SMALL, TESTED, refuted
from model_config import VARIANTS, Config
from model_search import explore

from mstar_tp.engine.resources.lora.cpu_cache.membership import CacheMembership, Changes, CpuCache
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.slots import SlotTable
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.scheduling.admission import AdmissionQueue


@pytest.mark.parametrize("name", TESTED)
def test_no_interleaving_breaks_the_protocol(name: str) -> None:
    found = explore(TESTED[name])
    assert found.broken is None, found.story()
    assert found.ends > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_refuted_variant_is_found_wrong(name: str) -> None:
    config, broken = refuted(name)
    found = explore(config)
    assert found.broken == broken, found.story()
    assert "=> " + broken in found.story()


def test_the_bound_on_waits_is_no_looser_than_it_must_be() -> None:
    """A row joins, runs its step, and is removed before the second step after the one it joined."""
    found = explore(replace(TESTED["bounded waits, three adapters"], bound=1))
    assert found.broken == "bounded wait", found.story()


BROKEN: dict[str, tuple[type, str, Callable[..., Any], Config, str]] = {
    "waiting rows are not tried when something grew": (
        AdmissionQueue,
        "_note_growth",
        lambda queue: None,
        SMALL,
        "no slot idle",
    ),
    "a remove moves nobody into the tier": (
        CacheMembership,
        "_fill",
        lambda cpu_cache: Changes(),
        SMALL,
        "oldest first",
    ),
    "a hold drops what is kept": (
        CpuCache,
        "_victims",
        lambda cpu_cache, cost, keep: cpu_cache.keys()[: max(0, cost - cpu_cache.free)],
        TESTED["three adapters, the second leaves"],
        "oldest first",
    ),
    "held slots are victims": (
        SlotTable,
        "victims",
        lambda slots: [slot for slot, _, _ in slots.rows()],
        replace(SMALL, capacity=2, slots=2),
        "sound tables",
    ),
    "failed copies are not dropped": (
        LoraAdapterPool,
        "failed_copies",
        lambda pool: [],
        TESTED["three adapters, the second leaves"],
        "nothing leaks",
    ),
    "failed copies of resident adapters are dropped": (
        LoraAdapterPool,
        "failed_copies",
        lambda pool: pool.tables.copies.unannounced(),
        replace(SMALL, slots=2),
        "nobody else fails",
    ),
    "reservations are not counted": (
        PoolTables,
        "claimed_adapters",
        lambda tables: set(tables.slots.held_keys()),
        replace(SMALL, capacity=2),
        "capacity",
    ),
}
"""A fault of the product's own tables -> where it is, what stands in, and what finds it."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model decides by the product's code: what is wrong there is wrong here."""
    owner, method, stand_in, config, broken = BROKEN[name]
    monkeypatch.setattr(owner, method, stand_in)
    found = explore(config)
    assert found.broken == broken, found.story()


def test_every_variant_has_its_case() -> None:
    assert set(REFUTED) == set(VARIANTS)


def test_the_model_needs_no_torch() -> None:
    look = "import sys, model_search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", look], cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize("window", [1, 2])
def test_the_reductions_lose_no_end(window: int) -> None:
    """Taking all interleavings one by one leads to the same ends as leaving out those that commute
    with others.
    """
    config = replace(SMALL, programs=(SMALL.programs[0][:2], (("abort", 0),)), steps=(1, 1))
    config = replace(config, window=window, capacity=2)
    assert _ends(config) == _ends(replace(config, reduce=False))


@pytest.mark.parametrize("name", ["no advance", "keep without prefix", "admit before copies"])
def test_the_reductions_hide_no_violation(name: str) -> None:
    config, broken = refuted(name)
    assert explore(replace(config, reduce=True)).broken == broken


def _ends(config: Config) -> set[object]:
    """Every end that can be reached: its tables in words, for numbers differ between models."""
    model = Model(config)
    start = model.settled(model.start())
    seen = {start}
    ends = set()
    todo = [start]
    while todo:
        state = todo.pop()
        if model.is_done(state):
            ends.add(_told(model, state))
        for _, after in model.after(state):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return ends


def _told(model: Model, state: State) -> object:
    ranks = [model.ranks.get(number) for number in state[4 : 4 + model.config.ranks]]
    return tuple(
        (
            str(model.ranks.cpu_cache.ask(rank.cpu_cache, "cpu_cache.keys")),
            str(model.ranks.slots.ask(rank.slots, "rows")),
            rank.served,
            rank.reads,
        )
        for rank in ranks
    )
