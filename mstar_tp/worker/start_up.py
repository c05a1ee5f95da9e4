"""Pieces of a rank's start: the thread that builds, the device, and one sentence for an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from mstar_tp.common.errors import ConfigError, MstarError

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that is gone when this returns.

    OpenMP keeps a team of helpers for every thread that ever computed, and once all teams together
    outnumber the cores, helpers sleep between two operations instead of spinning: each of a step's
    hundreds would wait for a wake-up. So the step thread's team must be the only one.

    Raises:
        BaseException: what ``work`` raised.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="start-up", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        if done.done():
            thread.join()


def describe(error: BaseException) -> str:
    """Return one sentence about ``error`` for a person.

    Our own errors speak for themselves, others are named by their type.
    """
    if isinstance(error, MstarError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def device_name(wanted: str) -> str:
    """The kind of device that ``wanted`` (auto, cpu, cuda) means here.

    Raises:
        ConfigError: it is cuda, and there is none.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda and torch sees no GPU here: choose cpu or auto")
    return wanted
