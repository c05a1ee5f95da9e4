"""A step's token ids and positions where captured graphs read them.

An id is written by the host or, where the token was sampled by the step before and has not reached
the host yet, is taken on the device from where that step left it. Step thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.kernels.staging import StagedTable

FROM_HOST = -1
"""The source of a token whose id the host knows."""
_IDS, _POSITIONS, _SOURCES = range(3)


class StepInputs:
    """The inputs of steps of up to ``max_tokens`` tokens.

    ``last_tokens`` int64 [max_rows]: what the rows of the step before sampled, NO_TOKEN where a row
    failed; whoever samples writes it.
    """

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        self._table = torch.zeros(3 * max_tokens, dtype=torch.int64, device=device)
        self._staged = StagedTable(self._table)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def write(
        self,
        size: int,
        ids: Sequence[int],
        positions: Sequence[int],
        sources: Sequence[int] | None = None,
    ) -> None:
        """Write the tokens of a step that runs as ``size``.

        The rest is padding: id 0 at position 0. ``sources``: the place of each id in
        ``last_tokens``, or FROM_HOST.
        """
        host = torch.zeros((3, size), dtype=torch.int64)
        host[_SOURCES] = FROM_HOST
        host[_IDS, : len(ids)] = torch.tensor(ids)
        host[_POSITIONS, : len(ids)] = torch.tensor(positions)
        if sources is not None:
            host[_SOURCES, : len(ids)] = torch.tensor(sources)
        self._staged.write(host.view(-1))

    def ids(self, size: int) -> torch.Tensor:
        """Return the ids of a step of ``size``.

        A token that a failed row did not get is 0: nobody reads what comes of it.
        """
        sources = self._part(_SOURCES, size)
        sampled = self.last_tokens.index_select(0, sources.clamp(min=0))
        return torch.where(sources < 0, self._part(_IDS, size), sampled).clamp_(min=0)

    def positions(self, size: int) -> torch.Tensor:
        return self._part(_POSITIONS, size)

    def _part(self, which: int, size: int) -> torch.Tensor:
        return self._table[which * size : (which + 1) * size]
