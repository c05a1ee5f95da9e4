"""Capture and replay of CUDA graphs, behind a seam where tests put a fake.

What is recorded between ``begin`` and ``end`` runs again with each ``replay``, on the same memory
and with the same numbers: nothing of Python does. Captured on the thread that starts the rank,
replayed on the step thread.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Graph(Protocol):
    def replay(self) -> None:
        """Launch what was recorded, behind all that this thread launched.

        The host waits for nothing.
        """
        ...


class GraphDevice(Protocol):
    """Captures on one device; one capture at a time."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around ``begin`` to ``end``, as often as they come."""
        ...

    def begin(self) -> None:
        """Record from here on."""
        ...

    def end(self) -> Graph:
        """Return what was recorded.

        Raises:
            RuntimeError: something cannot be captured.
        """
        ...

    def abandon(self) -> None:
        """An error came up between ``begin`` and ``end``: record no more. A no-op elsewhere."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory.

    They replay one at a time, in any order, and whatever outlives a replay is copied out of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._current: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        # Memory that a collection frees inside a capture would end the capture.
        gc.collect()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        assert self._current is None, "one capture at a time"
        self._current = torch.cuda.CUDAGraph()
        # Reader threads pin memory meanwhile, which a capture of all threads would forbid.
        self._current.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        graph, self._current = self._current, None
        assert graph is not None, "nothing is being captured"
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        graph, self._current = self._current, None
        if graph is None:
            return
        try:
            # A capture ends only on its own stream, which the error has already left.
            with torch.cuda.stream(self._stream):
                graph.capture_end()
        except RuntimeError as error:
            # The capture is invalid already, and the error that made it so is on its way up.
            assert error is not None
