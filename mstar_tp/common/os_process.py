"""Linux's means, beyond Python's library, for processes that belong together. No torch."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Have this process killed as soon as ``parent``, its parent, ends; at once when it has.

    The kernel does it: no thread of this process need be able to run. A no-op but on Linux.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Call this process ``name`` (15 characters at most) in listings. A no-op but on Linux."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def process_cpus() -> frozenset[int] | None:
    """The CPUs that this process may use, whatever its present thread's affinity.

    None where the system does not say.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(os.sched_getaffinity(os.getpid()))


def use_cpus(cpus: frozenset[int] | None) -> None:
    """Have this thread run on ``cpus``; it keeps its maker's where that cannot be (logged)."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        name = threading.current_thread().name
        logger.warning("thread %s keeps its maker's CPUs: %s", name, error)


def _prctl(option: int, value: object) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)
