"""The causes of groups' ends, as ranks say and as this process saw. The event loop's thread."""

from __future__ import annotations

from mstar_tp.frontend.adapters.rank_validations import by_text
from mstar_tp.frontend.metrics.outcomes import GroupEnd, group_end
from mstar_tp.wire.reports import Fatal, StartFailed

ASKED_TO_STOP = "the ranks were asked to stop"


class GroupCauses:
    """The causes of the present group's end, and what is kept of the groups before it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.said: dict[int, str] = {}
        """rank -> the reason why it stopped, in its own words."""
        self.losses: dict[int, str] = {}
        """rank -> how this process noticed that it is gone."""
        self.ends = dict.fromkeys(GroupEnd, 0)
        """The number of groups of ranks that ended and were followed by others, by reason."""
        self.fault: str | None = None
        """The reason why this process itself cannot go on, whatever the ranks do."""
        self._reports: list[Fatal | StartFailed] = []
        self.before: list[str] = []
        """The causes of the last group's end, a line each, while the next does not serve yet."""

    @property
    def killed(self) -> bool:
        """True when the process of a rank was ended by a signal."""
        return any("signal" in how for how in self.losses.values())

    def take(self, rank: int, report: Fatal | StartFailed) -> None:
        """Note why a rank stops, in its own words."""
        self.said[rank] = report.cause
        self._reports.append(report)

    def told(self) -> dict[int, str]:
        """Return why each rank is gone, by rank: in its own words, else how its process ended.

        A rank is called silent only where no rank's end says more.
        """
        ended = {rank: how for rank, how in self.losses.items() if how.startswith("its process")}
        return dict(sorted((ended | self.said or self.losses).items()))

    def lines(self) -> list[str]:
        """The causes of the present group's end, a line a cause that names its ranks."""
        return by_text(self.told().items(), self._world_size, named=True)

    def next_group(self, *, dismissed: bool) -> None:
        """Count the group's end; what is noted from now on is of the next one."""
        if dismissed:
            self.before = [ASKED_TO_STOP]
            self.ends[GroupEnd.ASKED_TO_STOP] += 1
        else:
            self.before = self.lines() or self.before
            self.ends[group_end(self._reports, self.losses.values())] += 1
        self._reports.clear()
        self.said.clear()
        self.losses.clear()

    def serves(self) -> None:
        """The next group serves: why the last one ended matters no more."""
        self.before = []
