"""The ranks' validations of one adapter that is to be loaded, and their joint result."""

from __future__ import annotations

from collections.abc import Iterable

from mstar_tp.frontend.api.api_errors import printable
from mstar_tp.wire.reports import LoadResult


class RankValidations:
    """The validations of one load, by rank."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._results: dict[int, LoadResult] = {}

    def take(self, rank: int, result: LoadResult) -> bool:
        """Note one rank's validation; return whether it was the last."""
        self._results[rank] = result
        return len(self._results) == self._world_size

    def refusal(self, name: str) -> str | None:
        """Return why the load of ``name`` is taken back, or None where every rank accepts it.

        The text says which ranks refused it, or which found another adapter there.
        """
        shown, results = printable(name), sorted(self._results.items())
        causes = [
            (rank, self.reason(name, one.cause)) for rank, one in results if one.cause is not None
        ]
        refused = by_text(causes, self._world_size)
        if refused:
            return f"adapter '{shown}' was refused by {'; '.join(refused)}"
        # What the ranks decide by is in the header: it must be one adapter on all of them.
        found = by_text([(rank, _summary(one)) for rank, one in results], self._world_size)
        if len(found) > 1:
            return (
                f"adapter '{shown}' is not the same on every rank: {'; '.join(found)}: make the "
                "files equal"
            )
        return None

    @staticmethod
    def reason(name: str, cause: str) -> str:
        """Return a rank's cause without the adapter's name, which the sentence around it has."""
        return cause.removeprefix(f"adapter {name!r}: ")


def by_text(items: Iterable[tuple[int, str]], world_size: int, *, named: bool = False) -> list[str]:
    """Return a line a text, as ``rank 0: …``, which names all ranks that said it.

    Lines are in order of the first rank of each. ``named``: texts may begin with their rank, which
    is not said again then.
    """
    return [
        text
        if named and text.startswith(("rank ", "the ranks"))
        else f"{_ranks(ranks, world_size)}: {text}"
        for text, ranks in ranks_by_text(items).items()
    ]


def ranks_by_text(items: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return text -> the ranks that said it, in order of the first of each.

    A text that begins with its rank is taken without.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in items:
        ranks_of.setdefault(text.removeprefix(f"rank {rank}: "), []).append(rank)
    return ranks_of


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "all ranks"
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _summary(result: LoadResult) -> str:
    return f"LoRA rank {result.lora_rank} on {', '.join(result.targets) or 'nothing'}"
