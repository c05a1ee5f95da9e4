"""KV pages copied between a rank's device and its host memory.

On CUDA devices copies run on a stream of their own, in their order, and begin at once: no step that
still runs uses their pages, be it that the request which had them is preempted once its last step
has ended, or that they were free (R4). Later steps wait for them: they may write the pages that are
copied out, and read those that are copied back. The host waits for neither. Step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from mstar_tp.engine.resources.kv.offload import Move
from mstar_tp.kernels.staging import to_device
from mstar_tp.layers.attention.attention import KVCache
from mstar_tp.lora.device.device_copies import DeviceQueues
from mstar_tp.lora.reading.host_memory import zeros


class HostCopies:
    """Host memory of ``num_pages`` KV pages, page-locked where the device is a GPU."""

    def __init__(self, kv: Sequence[KVCache], num_pages: int, queues: DeviceQueues) -> None:
        """``kv`` is the cache of every layer.

        Host memory is laid out as theirs, [layer, keys or values, num_pages, page_size, K, D]; on a
        CPU the system gives it as it is first written.
        """
        k = kv[0].k
        self._queues = queues
        self._caches = [tensor for layer in kv for tensor in (layer.k, layer.v)]
        self.page_bytes = sum(cache[0].numel() * cache.element_size() for cache in self._caches)
        shape = (len(self._caches), num_pages, *k.shape[1:])
        self._host = zeros(shape, k.dtype, page_locked=k.is_cuda)

    def out(self, moves: Sequence[Move]) -> None:
        """Launch the copies on the queue; see ``PageCopies``."""
        self._run(self._out, moves)

    def back(self, moves: Sequence[Move]) -> None:
        """Launch the copies on the queue; see ``PageCopies``."""
        self._run(self._back, moves)

    def _run(self, copy: Callable[[Move], None], moves: Sequence[Move]) -> None:
        for move in moves:
            self._queues.run(partial(copy, move))
        self._queues.steps_wait_for(self._queues.mark_copies())

    @torch.inference_mode()
    def _out(self, move: Move) -> None:
        pages = self._index(move.pages)
        for cache, host in zip(self._caches, self._host, strict=True):
            gathered = cache.index_select(0, pages)
            for at, place in runs(move.host_pages):
                host[place].copy_(gathered[at], non_blocking=True)

    @torch.inference_mode()
    def _back(self, move: Move) -> None:
        pages = self._index(move.pages)
        for cache, host in zip(self._caches, self._host, strict=True):
            landed = cache.new_empty((len(move.pages), *cache.shape[1:]))
            for at, place in runs(move.host_pages):
                landed[at].copy_(host[place], non_blocking=True)
            cache.index_copy_(0, pages, landed)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return to_device(pages, torch.int64, self._caches[0].device)


def runs(places: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The runs in ``places`` where numbers follow each other, with those numbers."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield slice(first, at), slice(places[first], places[at - 1] + 1)
            first = at
