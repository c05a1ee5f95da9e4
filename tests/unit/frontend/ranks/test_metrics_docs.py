"""Pins docs/operations.md to /metrics: every metric with its labels, and no other.

The dashboard and the alerts are pinned to series that exist.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric

from mstar_tp.engine.step.step_clock import LEADER_PHASES, STEP_PHASES, StepClock
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.metrics.outcomes import GroupEnd, Outcome, Refusal
from mstar_tp.frontend.metrics.server_metrics import Snapshot, exposition, families
from mstar_tp.wire.states import (
    AdapterState,
    CpuCacheState,
    LoraStats,
    Place,
    PlaceCounts,
    RankStats,
)
from mstar_tp.wire.stats import ProcessStats
from mstar_tp.wire.values import AdapterKey

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## Metrics\n")[2].partition("\n## ")[0]


def stats() -> RankStats:
    timing = StepClock(STEP_PHASES).stats(StepClock(LEADER_PHASES))
    cpu_cache = CpuCacheState(
        unit="bytes", capacity=1, used=1, peak=1, memory_bytes=1, peak_bytes=1
    )
    lora = LoraStats(
        slots=1, slots_held=1, evictions=1, agreed_failures=1, steps_waited_for_read=1,
        adapters_held=1, adapters_taken=1, cpu_cache=cpu_cache, places=PlaceCounts(device=1),
    )  # fmt: skip
    return RankStats(
        rank=0, query_id=0, steps=1, preemptions=1, waiting=1, running=1, requests=1, pages_used=1,
        pages_total=1, lora=(lora,), timing=timing,
        process=ProcessStats(resident_bytes=1, cpu_s=1.0, device_total_bytes=1),
        adapters=(AdapterState(adapter=AdapterKey("sql", 1), slot=1),),
    )  # fmt: skip


def all_families() -> list[Metric]:
    ends = dict.fromkeys(GroupEnd, 0)
    request_counters = RequestCounters()
    request_counters.by_adapter.used("sql")
    return list(families(Snapshot(request_counters, 0, True, 0, 1, {0: stats()}, ends)))


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
    for value in (*Outcome, *Refusal, *GroupEnd, *Place):
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


MONITORING = ROOT / "launch" / "monitoring"
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every query of the dashboard and the alerts, by where it stands."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    found = {rule["alert"]: rule["expr"] for rule in RULES}
    found["variable"] = dashboard["templating"]["list"][1]["query"]["query"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


@pytest.mark.parametrize("place, query", queries().items(), ids=queries())
def test_every_query_names_series_and_labels_that_exist(place: str, query: str) -> None:
    assert names_in(query) and names_in(query) <= set(served())
    kinds = {family.name: family.type for family in all_families()}
    for name, suffix, selector in re.findall(
        r"mstar_tp_(\w+?)(_bucket|_sum|_count|)\b(?:\{(.*?)\})?", query
    ):
        is_histogram = kinds.get(f"mstar_tp_{name}") == "histogram"
        assert is_histogram == bool(suffix), f"{place}: {name}"
        for label in re.findall(r"(\w+)=", selector):
            assert label in served()[name] | {"instance"}, f"{place}: {name} has no {label}"
    known = set().union(*served().values()) | {"le", "instance", "job"}
    for grouping in re.findall(r"by \((.*?)\)", query):
        assert set(grouping.split(", ")) <= known
    # Counters are looked at as rates.
    for name in served():
        if name.endswith("_total"):
            bare = re.search(rf"mstar_tp_{name}(\{{[^}}]*\}})?+(?![\w\[])", query)
            assert bare is None, f"{place}: {name}"


def test_values_in_selectors_exist() -> None:
    known = {"outcome": set(Outcome), "reason": {*Refusal, *GroupEnd}, "rank": {"0"}}
    known["place"] = set(Place)
    known["phase"] = {*LEADER_PHASES, *STEP_PHASES}
    text = " ".join(queries().values())
    for label, value in re.findall(r'(\w+)="(\w+)"', text):
        assert value in known[label], f"{label}={value}"


def test_every_alert_is_explained() -> None:
    section = TEXT.partition("\n### Alerts\n")[2].partition("\n##")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_alerts_and_a_scrape() -> None:
    subprocess.run(["promtool", "check", "rules", MONITORING / "alerts.yaml"], check=True)
    ends = dict.fromkeys(GroupEnd, 0)
    text = exposition(Snapshot(RequestCounters(), 0, True, 0, 1, {0: stats()}, ends))
    subprocess.run(["promtool", "check", "metrics"], check=True, input=text)
