"""The most this machine can do: bytes a second and floating-point operations a second.

Measured in the same run as what is held against them. Device-aware timing lives here too: on CUDA a
time is of one call in a replayed graph, so launches from Python cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.timing import Work, seconds_in_turn

GRAPH_CALLS = 20
BUFFER_BYTES = 256 << 20
"""Past any cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """``copy``: bytes read plus written by a large copy; ``read``: by a sum over a large buffer."""

    copy_bytes_s: float
    read_bytes_s: float
    gemm_flops_s: float

    @property
    def bytes_s(self) -> float:
        """The more generous of the two, which a share is of."""
        return max(self.copy_bytes_s, self.read_bytes_s)


class Timer:
    """Times work on one device, in turn."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats

    def medians(self, work: Mapping[str, Work]) -> dict[str, float]:
        """Median seconds of one call of each."""
        return {name: median(times) for name, times in self._times(work).items()}

    def best(self, work: Mapping[str, Work]) -> dict[str, float]:
        """The least: what the machine can do, whatever else runs on it."""
        return {name: min(times) for name, times in self._times(work).items()}

    def _times(self, work: Mapping[str, Work]) -> dict[str, list[float]]:
        if self.device.type != "cuda":
            return seconds_in_turn(work, self._repeats)
        event: Any = torch.cuda.Event
        graphs = {name: _captured(run) for name, run in work.items()}
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(self._repeats):
            for name, graph in graphs.items():
                start, stop = (event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                taken[name].append(start.elapsed_time(stop) / 1e3 / GRAPH_CALLS)
        return taken


def _captured(run: Work) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    return graph


def measure_ceilings(timer: Timer, dtype: torch.dtype, size: int = BUFFER_BYTES) -> Ceilings:
    """The ceilings of this device, GEMMs in ``dtype``; ``size``: bytes of the buffers."""
    device = timer.device
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    side = 4096 if device.type == "cuda" else 1024 if size >= BUFFER_BYTES else 128
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    times = timer.best(
        {
            "copy": lambda: target.copy_(source),
            "read": source.sum,
            "gemm": lambda: torch.mm(left, right, out=product),
        }
    )
    return Ceilings(
        copy_bytes_s=2 * source.nbytes / times["copy"],
        read_bytes_s=source.nbytes / times["read"],
        gemm_flops_s=2 * side**3 / times["gemm"],
    )
