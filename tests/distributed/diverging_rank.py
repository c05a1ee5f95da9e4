"""What a rank runs before it serves: rank 1 goes its own way in its slots, at step 4.

Its recording is written rarely, as on a starved machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_thread import StepResult
from mstar_tp.recording import recorder
from mstar_tp.wire.schedule import Step

STEP = 4


def lose_a_holder(runner: Any) -> None:
    """A holder is lost from a refcount."""
    entries = runner._lora.pools[0].tables.slots._slots.values()
    next(entry for entry in entries if entry.holders).holders.popitem()


def diverge() -> None:
    run = StepRunner.run

    def diverging(self: StepRunner, entry: Step, settled: Callable[[], None]) -> StepResult:
        if entry.tp_seq == STEP:
            lose_a_holder(self)
        return run(self, entry, settled)

    StepRunner.run = diverging  # type: ignore[method-assign]
    recorder.LOOK_EVERY_S = 0.5


if os.environ["RANK"] == "1":
    diverge()
