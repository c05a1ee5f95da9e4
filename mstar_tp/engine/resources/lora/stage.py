"""Which part of the model a pool's adapters change, and which rows of a step that part sees.

A model of text has one node. One that reads images has two, in the order they run: tower and
projector, then the decoder; each has a pool of its own. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.engine.resources.base import StepBatch
from mstar_tp.lora.device.addressing import LoraStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStage:
    """``number``: its place in the model's graph. ``name`` is empty where there is no other node.
    ``image_tokens``: how many tokens of an image the node runs; None where it runs the step's own.
    """

    number: int = 0
    name: str = ""
    image_tokens: int | None = None

    def runs(self, has_images: bool) -> bool:
        """Return whether a request's rows ever come to this node."""
        return has_images or self.image_tokens is None

    def rows(self, step: StepBatch) -> LoraStep:
        """What the node runs of a step: a row's own tokens, or the images that it encodes."""
        if self.image_tokens is None:
            return LoraStep(tuple((row.rid, row.num_tokens) for row in step.rows))
        images = (row.rid for row in step.rows for _ in row.images)
        return LoraStep(tuple((rid, self.image_tokens) for rid in images))


ONLY_STAGE = PoolStage()
