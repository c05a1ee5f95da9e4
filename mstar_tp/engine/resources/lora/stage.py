"""The stage of a model that a pool's adapters change, and the rows of a step that it runs.

A text model has one stage. A model that reads images has two, in the order they run: vision (tower
and projector), then language; each has a pool of its own. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.engine.resources.base import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStage:
    """A stage of the model's graph, at place ``number`` of those that run.

    ``name`` is empty where it is the only one. ``image_tokens`` is how many tokens of an image the
    stage runs; None where it runs the step's own tokens.
    """

    number: int = 0
    name: str = ""
    image_tokens: int | None = None

    def runs(self, has_images: bool) -> bool:
        """Return whether a request's rows ever come to this stage."""
        return has_images or self.image_tokens is None

    def rows(self, step: StepBatch) -> list[tuple[int, int]]:
        """The (request, number of tokens) of each row or image that the stage runs, in order."""
        if self.image_tokens is None:
            return [(row.rid, row.num_tokens) for row in step.rows]
        return [(row.rid, self.image_tokens) for row in step.rows for _ in row.images]


ONLY_STAGE = PoolStage()
