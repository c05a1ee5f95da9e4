"""What captures on CUDA and what sets a GPU up, over a fake for ``torch.cuda`` that
refuses what CUDA refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mstar_tp.common.errors import MstarError
from mstar_tp.config import EngineConfig
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.build import build_engine
from mstar_tp.engine.graphs.device import CudaGraphs

DEVICE = torch.device("cuda", 1)


class Cuda:
    """The streams of one thread, and the stream that is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: object = "default"
        self.captured: object = None
        cuda = self

        class Graph:
            def capture_begin(self, **options: Any) -> None:
                assert cuda.captured is None and cuda.current != "default"
                cuda.captured = cuda.current

            def capture_end(self) -> None:
                if cuda.current is not cuda.captured:
                    raise RuntimeError("Capture must end on the same stream it began on.")
                cuda.captured = None

        def synchronize(device: torch.device) -> None:
            assert self.captured is None, "operation not permitted when stream is capturing"

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def test_a_capture_that_fails_ends_so_that_eager_steps_can_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    graphs = CudaGraphs(DEVICE)
    with pytest.raises(ValueError, match="no kernel"), graphs.capturing():
        graphs.begin()
        raise ValueError("no kernel")
    graphs.abandon()
    assert cuda.captured is None
    with graphs.capturing():  # and the next may begin
        graphs.begin()
        graphs.end()
    graphs.abandon()
    assert cuda.captured is None and cuda.current == "default"


def test_the_thread_that_starts_a_rank_works_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.get_ident(), device))
    )
    with pytest.raises(MstarError):
        build_engine(
            EngineConfig(model="/nowhere"),
            JointGroups(SingleGroup()),
            DEVICE,
            lambda report: None,
            lambda text: None,
        )
    assert chosen == [(threading.get_ident(), DEVICE)]
