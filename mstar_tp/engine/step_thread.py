"""The step thread: runs announced steps one after another, in the leader's order.

The only thread that calls collectives once the rank serves, and the only one that waits for a
device. Work comes in by a
queue and results leave by a queue; a failing step ends the thread, and its error is the last
result. Between two steps that both have been submitted it waits for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Protocol

from mstar_tp import log
from mstar_tp.engine.sampling import Sampled
from mstar_tp.wire.messages import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How a step ended: what each sampling row drew, rows that ended with it and why, and rows that
    failed on every rank alike.
    """

    tp_seq: int
    sampled: dict[int, Sampled] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: str | None = None
    error: BaseException | None = None
    launched_at: float = 0.0
    """By ``time.monotonic``, as is the end: its forward took what lies between."""
    ended_at: float = 0.0


class WakeAt(Enum):
    """When the step thread wakes the main thread, besides for an error.

    Each wake takes the interpreter from a step, so a main thread asks for those it acts on.
    """

    RESULT = "the end of a step"
    LAUNCH = "the launch of a step, or the end of one that no other follows"
    ERROR = "errors only"


RunStep = Callable[[Step, Callable[[], None]], StepResult]
"""Runs a step, and calls its second argument once admit and plan are over."""


class Fence(Protocol):
    def settle(self, tp_seq: int) -> None: ...
    def finish(self, tp_seq: int) -> None: ...
    def close(self) -> None: ...


class StepThread:
    """Owns the thread. ``run_step`` runs one step there; ``wake`` wakes the main thread, at
    ``wake_at``.
    """

    def __init__(
        self,
        run_step: RunStep,
        fence: Fence,
        wake: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
        wake_at: WakeAt = WakeAt.RESULT,
    ) -> None:
        self._run_step = run_step
        self._fence = fence
        self._wake = wake
        self._prepare = prepare
        self._wake_at = wake_at
        self._work: SimpleQueue[Step | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self.launched_at = 0.0
        """When the last step that settled was launched, by ``time.monotonic``. Any thread."""
        self._began_at: float | None = None
        """When the step that runs now began, by the same clock. Any thread reads it."""
        self._thread = threading.Thread(target=self._loop, name="step", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError where the system has no thread to give; nobody waits for one then."""
        try:
            self._thread.start()
        except BaseException:
            self._fence.close()
            raise

    def submit(self, step: Step) -> None:
        """Hand over a step; never blocks. Main thread."""
        self._work.put(step)

    def running_for_s(self) -> float:
        """For how long the present step has run; 0 between steps. Any thread."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def results(self) -> list[StepResult]:
        """Every result since the last call, in order; never blocks. Main thread."""
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except Empty:
                return results

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted and end the thread; whether it ended in time. Main thread."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            logger.exception("the step thread cannot start")
            self._end(StepResult(tp_seq=-1, error=error))
            return
        try:
            while (step := self._work.get()) is not None:
                if not self._run(step):
                    return
        finally:
            self._fence.close()

    def _end(self, result: StepResult) -> None:
        self._results.put(result)
        self._fence.close()
        self._wake()

    def _run(self, step: Step) -> bool:
        log.at_step(step.tp_seq)
        self._began_at = time.monotonic()
        try:
            result = self._run_step(step, lambda: self._settle(step.tp_seq))
        except BaseException as error:
            logger.exception("step %d failed", step.tp_seq)
            result = StepResult(tp_seq=step.tp_seq, error=error)
        self._began_at = None
        ends = replace(result, launched_at=self.launched_at, ended_at=time.monotonic())
        self._results.put(ends)
        self._fence.finish(step.tp_seq)
        if result.error is not None or self._wakes_at_end():
            self._wake()
        return result.error is None

    def _settle(self, tp_seq: int) -> None:
        self.launched_at = time.monotonic()
        self._fence.settle(tp_seq)
        if self._wake_at is WakeAt.LAUNCH:
            self._wake()

    def _wakes_at_end(self) -> bool:
        if self._wake_at is WakeAt.LAUNCH:
            # A step that waits already wakes the main thread when its own launch starts, which is
            # off the way from this step to that one.
            return self._work.empty()
        return self._wake_at is WakeAt.RESULT
