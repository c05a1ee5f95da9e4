"""Pins the one contract of resources: a refused admit leaves every resource as it was."""

from __future__ import annotations

from mstar_tp.engine.resources.base import (
    AdmitOutcome,
    Admitted,
    Ask,
    StepBatch,
    StepRow,
    admit_in_turn,
)


class FakeResource:
    """Gives each row one of its places, and notes every call in ``calls``."""

    def __init__(
        self,
        name: str,
        calls: list[tuple[str, str, tuple[int, ...]]],
        *,
        places: int = 9,
        lost: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.holders: list[int] = []
        self._calls = calls
        self._places = places
        self._lost = lost
        self._fresh: list[int] = []

    def admit(self, step: StepBatch) -> AdmitOutcome:
        rids = self._note("admit", step)
        self._fresh = []
        for rid in rids:
            if rid in self._lost or rid in self.holders:
                continue
            if len(self.holders) == self._places:
                return AdmitOutcome(refused=f"{self.name} is full")
            self.holders.append(rid)
            self._fresh.append(rid)
        return AdmitOutcome(failed={rid: f"{self.name} lost it" for rid in self._lost})

    def rollback_admit(self, step: StepBatch) -> None:
        self._note("rollback", step)
        self.holders = [rid for rid in self.holders if rid not in self._fresh]
        self._fresh = []

    def commit(self, step: StepBatch) -> None:
        self._note("commit", step)
        self._fresh = []

    def ask(self, rid: int) -> Ask | None:
        return None if rid in self.holders else Ask.ASKS

    def reserve(self, rid: int) -> int | None:
        return None

    def unreserve(self, rid: int) -> None:
        pass

    def growth_mark(self) -> int:
        return 0

    def grew_since(self, mark: int) -> bool:
        return False

    def post_warmup_validate(self) -> None:
        pass

    def _note(self, name: str, step: StepBatch) -> tuple[int, ...]:
        rids = tuple(row.rid for row in step.rows)
        self._calls.append((self.name, name, rids))
        return rids


Calls = list[tuple[str, str, tuple[int, ...]]]


def step_of(*rids: int) -> StepBatch:
    rows = tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in rids)
    return StepBatch(tp_seq=0, rows=rows)


def test_every_resource_admits_in_turn_and_nothing_is_rolled_back() -> None:
    calls: Calls = []
    adapters, pages = FakeResource("adapters", calls), FakeResource("pages", calls)
    assert admit_in_turn((adapters, pages), step_of(1, 2)) == Admitted(step_of(1, 2), {}, None)
    assert calls == [("adapters", "admit", (1, 2)), ("pages", "admit", (1, 2))]
    assert adapters.holders == pages.holders == [1, 2]


def test_a_kv_refusal_leaves_no_adapter_assigned() -> None:
    calls: Calls = []
    adapters, pages = FakeResource("adapters", calls), FakeResource("pages", calls, places=1)
    admitted = admit_in_turn((adapters, pages), step_of(1, 2))
    assert admitted.refused == "pages is full"
    assert adapters.holders == [] and pages.holders == []
    assert [name for name, call, _ in calls if call == "rollback"] == ["pages", "adapters"]


def test_a_refused_second_adapter_pool_leaves_the_first_as_it_was() -> None:
    calls: Calls = []
    vision, language = FakeResource("vision", calls), FakeResource("language", calls, places=1)
    pages = FakeResource("pages", calls)
    vision.holders.append(7)
    admitted = admit_in_turn((vision, language, pages), step_of(7, 8))
    assert admitted.refused == "language is full"
    assert vision.holders == [7], "only what this admit took is given back"
    assert language.holders == [] and pages.holders == []
    assert ("pages", "admit", (7, 8)) not in calls, "it was not reached"
    assert [name for name, call, _ in calls if call == "rollback"] == ["language", "vision"]


def test_a_row_that_failed_asks_for_nothing_of_the_resources_after() -> None:
    calls: Calls = []
    adapters = FakeResource("adapters", calls, lost=(2,))
    pages = FakeResource("pages", calls)
    admitted = admit_in_turn((adapters, pages), step_of(1, 2, 3))
    assert admitted == Admitted(step_of(1, 3), {2: "adapters lost it"}, None)
    assert pages.holders == [1, 3]


def test_a_row_that_failed_before_a_refusal_stays_failed() -> None:
    calls: Calls = []
    adapters = FakeResource("adapters", calls, lost=(2,))
    pages = FakeResource("pages", calls, places=0)
    admitted = admit_in_turn((adapters, pages), step_of(1, 2))
    assert admitted == Admitted(step_of(1), {2: "adapters lost it"}, "pages is full")
    assert calls[-1] == ("adapters", "rollback", (1, 2)), "with the step it was admitted"
