"""The rule by which announced steps are void because one before them was refused (R5).

A step may have been planned while the one before it ran. Should that one's admit be refused, its
rows are not what the plan took them for, so the later step is void if it carries any of them; it
reaches its place among the admits on every rank and runs nowhere. The leader plans again once it
knows. No torch.
"""

from __future__ import annotations

from mstar_tp.wire.schedule import Step


class Refusals:
    """The last step that did not run, refused or void. Equal on every rank. Step thread."""

    def __init__(self) -> None:
        self._tp_seq = -1
        self._rids: frozenset[int] = frozenset()

    def refuse(self, step: Step) -> None:
        """The admit of ``step`` was refused on every rank."""
        self._tp_seq = step.tp_seq
        self._rids = frozenset(rid for rid, _ in step.rows)

    def void(self, step: Step) -> str | None:
        """The reason why ``step`` is void, or None. One that is void makes others void too."""
        if self._tp_seq <= step.planned_after:
            return None
        if not any(rid in self._rids for rid, _ in step.rows):
            return None
        cause = f"step {step.tp_seq} is void: step {self._tp_seq}, which did not run, has its rows"
        self.refuse(step)
        return cause
