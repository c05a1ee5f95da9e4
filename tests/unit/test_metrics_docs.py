"""Pins docs/operations.md to what /metrics says: every metric with its labels, no other, and every
name that a table for people from elsewhere gives.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from prometheus_client import Metric

from mstar_tp.engine.step_clock import LEADER_PHASES, STEP_PHASES, StepClock
from mstar_tp.frontend.metrics import Snapshot, families
from mstar_tp.frontend.outcomes import GroupEnd, Outcome, Refusal
from mstar_tp.frontend.tally import Tally
from mstar_tp.wire.figures import ProcessFigures
from mstar_tp.wire.messages import LoraFigures, RankFigures, TierState

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## Metrics\n")[2].partition("\n## ")[0]


def figures() -> RankFigures:
    timing = StepClock(STEP_PHASES).figures(StepClock(LEADER_PHASES))
    tier = TierState(unit="bytes", capacity=1, used=1, peak=1, pinned_bytes=1, peak_bytes=1)
    lora = LoraFigures(
        slots=1, slots_held=1, evictions=1, agreed_failures=1, steps_waited_for_read=1,
        adapters_held=1, adapters_taken=1, tier=tier,
    )  # fmt: skip
    return RankFigures(
        rank=0, query_id=0, steps=1, preemptions=1, waiting=1, running=1, requests=1, pages_used=1,
        pages_total=1, lora=(lora,), timing=timing,
        process=ProcessFigures(resident_bytes=1, cpu_s=1.0, device_total_bytes=1),
    )  # fmt: skip


def all_families() -> list[Metric]:
    ends = dict.fromkeys(GroupEnd, 0)
    return list(families(Snapshot(Tally(), 0, True, 0, 1, {0: figures()}, ends)))


@cache
def served() -> dict[str, frozenset[str]]:
    """metric, as it is written in a query less its prefix -> its labels."""
    found = {}
    for family in all_families():
        name = family.name.removeprefix("mstar_tp_")
        assert name != family.name and family.samples, family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name + "_total" * (family.type == "counter")] = frozenset(labels)
    return found


def test_the_table_has_every_metric_with_its_labels_and_no_other() -> None:
    table = SECTION.partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", table, re.M)
    documented = {
        name: frozenset(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == served()


def test_histograms_say_that_they_are() -> None:
    histograms = {family.name for family in all_families() if family.type == "histogram"}
    table = SECTION.partition("\n### ")[0]
    for row in re.findall(r"^\| `.+ \|$", table, re.M):
        for name in re.findall(r"`(\w+)`", row.partition(" | ")[0]):
            assert ("histogram" in row) == (f"mstar_tp_{name}" in histograms), name


def test_names_follow_the_conventions() -> None:
    for name in served():
        assert re.fullmatch(r"[a-z][a-z_]*", name)
        assert not re.search(r"_(ms|us|s|kb|mb|percent)(_|$)", name), name


def test_every_value_of_a_label_is_explained() -> None:
    for value in (*Outcome, *Refusal, *GroupEnd):
        if value is not GroupEnd.OTHER:
            assert f"`{value}`" in SECTION, value
    for phase in (*LEADER_PHASES, *STEP_PHASES):
        assert f"`{phase}`" in SECTION


def names_in(text: str) -> set[str]:
    """Metrics of ours in queries or prose, less prefix and what a histogram's series add."""
    found = set()
    for name in re.findall(r"\bmstar_tp_(\w+)", text):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if base in served() else name)
    return found


def test_every_name_in_the_documents_exists() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        prose = text.replace("`mstar_tp_`", "").replace("mstar_tp/", "")
        assert names_in(re.sub(r"mstar_tp_\*", "", prose)) <= set(served()), page.name
