"""The step thread: runs announced steps one after another, in the leader's order.

It is the only thread that calls collectives once the rank serves, and the only one that waits for a
device. Work comes in by a queue and results leave by a queue; a failing step ends the thread, and
its error is the last result. Between two steps that both have been submitted it waits for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from mstar_tp.common import log
from mstar_tp.engine.sampling.sampler import Sampled
from mstar_tp.wire.schedule import Step

logger = logging.getLogger(__name__)

POLL_S = 2e-4
"""Seconds between two looks at the device by a step thread that has no step to launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The end of a step: each sampling row's token, and the rows that ended or failed, with why."""

    tp_seq: int
    sampled: dict[int, Sampled] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: str | None = None
    error: BaseException | None = None
    launched_at: float = 0.0
    """The begin by ``time.monotonic``, as is the end: its forward took what lies between."""
    ended_at: float = 0.0


class WakeAt(Enum):
    """The moments at which the step thread wakes the main thread, besides for an error.

    Each wake takes the interpreter from a step, so a main thread asks for those it acts on.
    """

    RESULT = "the end of a step"
    LAUNCH = "the launch of a step, or the end of one that no other follows"
    ERROR = "errors only"


RunStep = Callable[[Step, Callable[[], None]], Sequence[StepResult]]
"""Runs a step, and calls its second argument once admit and plan are over.

Returns the results of the steps that have ended with it, in order: its own may come with a later
one's, or from ``OnDevice``."""


class OnDevice(Protocol):
    """Steps that were launched and whose results are still to come."""

    def flush(self) -> Sequence[StepResult]:
        """Wait for them; their results, in order."""
        ...

    def has_landed(self) -> bool:
        """Return whether ``flush`` would not wait. Never blocks."""
        ...


class Fence(Protocol):
    def settle(self, tp_seq: int) -> None: ...
    def finish(self, tp_seq: int) -> None: ...
    def close(self) -> None: ...


class StepThread:
    """Owns the thread, which runs each step by ``run_step``.

    ``wake`` wakes the main thread, at ``wake_at``. ``on_device`` is asked where results may come
    with a later call.
    """

    def __init__(
        self,
        run_step: RunStep,
        fence: Fence,
        wake: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
        wake_at: WakeAt = WakeAt.RESULT,
        on_device: OnDevice | None = None,
    ) -> None:
        self._on_device = on_device
        self._launches: dict[int, float] = {}
        """When each step was launched that has not ended, by ``time.monotonic``."""
        self._ended_at = 0.0
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
        """The seconds for which the present step has run; 0 between steps. Any thread."""
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
            while (step := self._next()) is not None:
                if not self._do(step.tp_seq, partial(self._run_step, step, self._settler(step))):
                    return
        finally:
            self._fence.close()

    def _next(self) -> Step | None:
        """The next step, once one is submitted; meanwhile results of the device are passed on."""
        while self._launches:
            assert self._on_device is not None, "a step that was launched has no result"
            self._began_at = min(self._launches.values())
            stops = False
            try:
                step = self._work.get(timeout=POLL_S)
                if step is not None:
                    return step
                stops = True
            except Empty:
                if not self._on_device.has_landed():
                    continue
            if not self._do(max(self._launches), self._on_device.flush) or stops:
                return None
        return self._work.get()

    def _settler(self, step: Step) -> Callable[[], None]:
        return lambda: self._settle(step.tp_seq)

    def _end(self, result: StepResult) -> None:
        self._results.put(result)
        self._fence.close()
        self._wake()

    def _do(self, tp_seq: int, work: Callable[[], Sequence[StepResult]]) -> bool:
        """Let steps up to ``tp_seq`` go on; whether none failed."""
        log.at_step(tp_seq)
        self._began_at = time.monotonic()
        results: Sequence[StepResult]
        try:
            results = work()
        except BaseException as error:
            logger.exception("step %d failed", tp_seq)
            results = [StepResult(tp_seq=tp_seq, error=error)]
        self._began_at = None
        for result in results:
            self._put(result)
        failed = any(result.error is not None for result in results)
        if failed or (results and self._wakes_at_end(results[-1].tp_seq < tp_seq)):
            self._wake()
        return not failed

    def _put(self, result: StepResult) -> None:
        # A device begins a step when the one before it has ended.
        launched_at = max(self._launches.pop(result.tp_seq, 0.0), self._ended_at)
        self._ended_at = time.monotonic()
        self._results.put(replace(result, launched_at=launched_at, ended_at=self._ended_at))
        self._fence.finish(result.tp_seq)

    def _settle(self, tp_seq: int) -> None:
        self.launched_at = self._launches[tp_seq] = time.monotonic()
        self._fence.settle(tp_seq)
        if self._wake_at is WakeAt.LAUNCH:
            self._wake()

    def _wakes_at_end(self, another_runs: bool) -> bool:
        """Return whether to wake for a result; ``another_runs`` when one was launched behind it."""
        if self._wake_at is WakeAt.LAUNCH:
            # A step that waits already wakes the main thread when its own launch starts, which is
            # off the way from this step to that one.
            return another_runs or self._work.empty()
        return self._wake_at is WakeAt.RESULT
