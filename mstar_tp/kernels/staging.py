"""A table on a device that is written anew for each step, while steps before may still read it.

A host writes it in page-locked memory and one copy on the current stream takes it over, so it is
ordered behind every launched step, and the host waits for none. There are two such pieces of
memory, taken in turn: filling one for step N + 1 never races the copy of step N, and before one is
filled again its last copy, of the step before that, is waited for. Step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

NUM_BUFFERS = 2
ALIGNED = 16
"""Tables that share a buffer begin at multiples of so many numbers.

Kernels are compiled for aligned pointers alone, not anew in the middle of serving.
"""


def to_device(
    values: Sequence[object] | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor on ``device`` of the host's ``values``.

    It is written behind every launched step, which the host does not wait for.
    """
    table = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":  # the allocator of page-locked memory keeps it until the copy is over
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


class CopyEvent(Protocol):
    """A point in a stream."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class _Buffer:
    """Pinned memory and the end of its last copy; None where a copy is over when it returns."""

    def __init__(self, table: torch.Tensor, copied: CopyEvent | None) -> None:
        self.host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        self.copied = copied


class StagedTable:
    """``table`` on its device, and the two places it is written from."""

    def __init__(
        self, table: torch.Tensor, new_event: Callable[[], CopyEvent] | None = None
    ) -> None:
        """``new_event``: None for CUDA's own on a CUDA device, and for none elsewhere."""
        self.table = table
        self._new_event = _cuda_event if new_event is None and table.is_cuda else new_event
        self._buffers: list[_Buffer] = []
        """Made when first needed: a table that is written once has one."""
        self._writes = 0

    def write(self, values: torch.Tensor) -> None:
        """Make ``values``, a tensor on the host, the table's first numbers.

        The write comes before whatever is launched next.
        """
        buffer, count = self._free_buffer(), len(values)
        buffer.host[:count].copy_(values)
        self.table[:count].copy_(buffer.host[:count], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()

    def _free_buffer(self) -> _Buffer:
        buffer_no = self._writes % NUM_BUFFERS
        self._writes += 1
        if buffer_no == len(self._buffers):
            event = None if self._new_event is None else self._new_event()
            self._buffers.append(_Buffer(self.table, event))
            return self._buffers[buffer_no]
        buffer = self._buffers[buffer_no]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer


def _cuda_event() -> CopyEvent:
    event: CopyEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
