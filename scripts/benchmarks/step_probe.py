"""Inside a rank: how long each phase of each step takes. Installed before the rank serves.

Wraps the methods in ``PHASES`` on their classes. A phase's time is its own: what it calls and is
itself a phase counts there. Main and step thread each keep their own figures; main hands a step's
over with the step. Each inspection of the instance ends a segment: the rank writes it to a file and
reads from another what the next one is to be, ``time`` or ``profile``.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mstar_tp.engine.checks import TableChecks
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.scheduler import Scheduler
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_tables import StepTables
from mstar_tp.engine.step.step_thread import StepThread
from mstar_tp.wire.channels import ScheduleServer
from mstar_tp.wire.client import Client
from mstar_tp.worker.leader import Leader
from mstar_tp.worker.state import RankState

MAIN_PHASES: dict[str, tuple[tuple[type, str], ...]] = {
    "ingest": ((Leader, "_take_messages"), (Leader, "_take_reports")),
    "results": ((Leader, "_take_results"),),
    "emit": ((Client, "send"),),
    "removes": ((Leader, "_schedule_removes"),),
    "schedule": ((Scheduler, "plan"),),
    "hashes": ((RankState, "checks"),),
    "broadcast": ((ScheduleServer, "broadcast"),),
    "iterate": ((Leader, "iterate"),),
}
STEP_PHASES: dict[str, tuple[tuple[type, str], ...]] = {
    "verify": ((TableChecks, "verify"),),
    "admit": ((StepTables, "admit"),),
    "plan": ((ServedModel, "plan"), (ServedModel, "plan_decode"), (LoraPools, "plan")),
    "forward": (
        (ServedModel, "forward"),
        (ServedModel, "logits"),
        (ServedModel, "decode"),
    ),
    "sample": ((StepRunner, "_sample"),),
    "commit": ((StepTables, "commit"),),
    "rows": ((StepRunner, "run"),),
}
"""``turn`` and ``rows`` are what is left of the leader's turn and of the step thread's step."""
PROFILED_STEPS = 20
STEP_MARK = "mstar_tp step"
COLLECTIVES = "collectives"
"""Calls that wait for other ranks."""


def install(folder: Path, rank: int) -> None:
    """Wrap everything, in this process and for good."""
    probe = Probe(folder, rank)
    for phases in (MAIN_PHASES, STEP_PHASES):
        for phase, methods in phases.items():
            for cls, name in methods:
                setattr(cls, name, probe.timed(phase, getattr(cls, name)))
    StepRunner.run = probe.stepping(StepRunner.run)  # type: ignore[method-assign]
    StepThread.submit = probe.submitting(StepThread.submit)  # type: ignore[method-assign]
    RankState.report = probe.reporting(RankState.report)  # type: ignore[method-assign]
    _time_cpp_calls(probe)


class _Clock(threading.local):
    """One thread's open phases and what they took since it last handed them over."""

    def __init__(self) -> None:
        self.inner_ns: list[int] = [0]
        self.spent_ns: dict[str, int] = defaultdict(int)


class Probe:
    """One rank's figures.

    ``_steps`` belongs to the step thread, ``_main`` to the main thread; both are read by the main
    thread at an inspection, when no step runs.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._clock = _Clock()
        self._steps: dict[int, dict[str, Any]] = {}
        self._main: dict[int, dict[str, int]] = {}
        self._segment = 0
        self._profile_next = False
        self._profiler: Any = None
        self.profiling = False
        self._cpp_ns: dict[str, int] = defaultdict(int)
        self._cpp_steps: list[dict[str, int]] = []
        self._kernels: dict[str, float] = {}

    def timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, whose own time counts as ``phase``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            clock.inner_ns.append(0)
            begin = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - begin
                clock.spent_ns[phase] += took - clock.inner_ns.pop()
                clock.inner_ns[-1] += took

        return run

    def submitting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Count the main thread's work since the last step for the one it hands over."""

        def submit(thread: Any, step: Any) -> None:
            spent = self._clock.spent_ns
            self._main[step.tp_seq] = dict(spent)
            spent.clear()
            method(thread, step)

        return submit

    def stepping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step's rows, begin and phases."""

        def run(runner: Any, entry: Any, settled: Any) -> Any:
            self._turn_profiler()
            spent = self._clock.spent_ns
            spent.clear()
            begin = time.perf_counter_ns()
            profiled = self.profiling
            if profiled:
                result = self._profiled(method, runner, entry, settled)
            else:
                result = method(runner, entry, settled)
            end = time.perf_counter_ns()
            self._steps[entry.tp_seq] = {
                "tp_seq": entry.tp_seq,
                "rows": len(entry.rows),
                "tokens": sum(count for _, count in entry.rows),
                "begin_ns": begin,
                "end_ns": end,
                "step": dict(spent),
                "profiled": profiled,
            }
            return result

        return run

    def reporting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """An inspection ends the segment, before its answer leaves."""

        def report(*args: Any, **kwargs: Any) -> Any:
            self._write()
            return method(*args, **kwargs)

        return report

    def cpp_call(self, function: str, took_ns: int) -> None:
        """A call into one of our libraries took this long, while a profile is made."""
        kind = COLLECTIVES if "collective" in function else "kernels"
        self._cpp_ns[kind] += took_ns

    def _write(self) -> None:
        steps = [
            {**step, "main": self._main.get(number, {})} for number, step in self._steps.items()
        ]
        self._stop_profiler()
        text = json.dumps({"steps": steps, "kernels": self._kernels})
        path = self._folder / f"rank{self._rank}.{self._segment}.json"
        path.with_suffix(".part").write_text(text, encoding="utf-8")
        path.with_suffix(".part").rename(path)
        self._steps, self._main, self._kernels = {}, {}, {}
        self._segment += 1
        self._profile_next = (self._folder / "mode").read_text(encoding="utf-8") == "profile"

    # --------------------------------------------------------------- profiles, on the step thread

    def _turn_profiler(self) -> None:
        if self._profile_next and self._steps:  # the first step of a segment is a prompt's
            self._profile_next = False
            self._cpp_steps.clear()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            )
            self._profiler.start()
            self.profiling = True
        elif self.profiling and len(self._cpp_steps) == PROFILED_STEPS:
            self._end_profile()

    def _profiled(self, method: Callable[..., Any], *step: Any) -> Any:
        self._cpp_ns.clear()
        with torch.profiler.record_function(STEP_MARK):
            result = method(*step)
        self._cpp_steps.append(dict(self._cpp_ns))
        return result

    def _end_profile(self) -> None:
        """Median microseconds a step of torch's operators, and of our libraries' calls."""
        self.profiling = False
        self._profiler.stop()
        marks = [event for event in self._profiler.events() if event.name == STEP_MARK]
        self._profiler = None
        ops = [[child.cpu_time_total for child in mark.cpu_children] for mark in marks]
        self._kernels = {
            "torch_us": median(map(sum, ops)),
            "torch_ops": median(map(len, ops)),
            "cpp_us": self._cpp_us("kernels"),
            "collectives_us": self._cpp_us(COLLECTIVES),
        }

    def _cpp_us(self, kind: str) -> float:
        return median(step.get(kind, 0) for step in self._cpp_steps) / 1e3

    def _stop_profiler(self) -> None:
        """A segment that was shorter than a profile leaves none; its thread is idle now."""
        if self.profiling:
            self.profiling = False
            self._profiler = None


def _time_cpp_calls(probe: Probe) -> None:
    """Functions that are looked up in a library from here on say how long they took."""
    look_up = ctypes.CDLL.__getattr__

    def timed(library: ctypes.CDLL, name: str) -> Any:
        function = _TimedFunction(look_up(library, name), name, probe)
        setattr(library, name, function)
        return function

    ctypes.CDLL.__getattr__ = timed  # type: ignore[method-assign]


class _TimedFunction:
    """A library's function; its signature is set and read through it."""

    def __init__(self, function: Any, name: str, probe: Probe) -> None:
        object.__setattr__(self, "parts", (function, name, probe))

    def __call__(self, *args: Any) -> Any:
        function, name, probe = self.parts
        if not probe.profiling:
            return function(*args)
        begin = time.perf_counter_ns()
        try:
            return function(*args)
        finally:
            probe.cpp_call(name, time.perf_counter_ns() - begin)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.parts[0], name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parts[0], name)


def script(folder: Path) -> str:
    """The script that a rank runs before it serves, to be measured into ``folder``."""
    return (
        "from pathlib import Path\n"
        "from benchmarks.step_probe import install\n"
        "from mstar_tp.common.env import rank_env\n"
        f"install(Path({str(folder)!r}), rank_env().rank)\n"
    )
