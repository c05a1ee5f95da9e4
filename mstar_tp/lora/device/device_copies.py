"""Copies of adapters to the device, queued beside the steps, and the waits between the two queues.

A copy into a slot waits for the last step that read the slot, a step for the copies into the slots
that it reads; nothing else waits, and the host for nothing. The adapter that a copy reads is kept
until the copy has ended, so its memory is neither freed nor used again before. Step thread, but for
``reap``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """A place in one of the device's queues."""

    def done(self) -> bool:
        """True once everything before it has ended. Does not block; any thread."""
        ...


class DeviceQueues(Protocol):
    """Two queues of one device's work, each in order by itself: steps and copies.

    No call blocks on the device.
    """

    def copy(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Queue copies (to, source) from page-locked memory into any layout.

        Sources that lie side by side in one piece of memory are moved by one transfer.
        """
        ...

    def fill(self, to: torch.Tensor, value: float) -> None:
        """Queue writing ``value`` everywhere, behind the copies so far."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Queue whatever ``work`` launches, behind the copies so far."""
        ...

    def mark_copies(self) -> DeviceEvent:
        """Done when every copy queued so far is."""
        ...

    def mark_steps(self) -> DeviceEvent:
        """Done when everything launched so far for steps is."""
        ...

    def copies_wait_for(self, event: DeviceEvent) -> None:
        """Copies queued from now on begin after it."""
        ...

    def steps_wait_for(self, event: DeviceEvent) -> None:
        """Make what is launched for steps from now on begin after it."""
        ...


class SlotCopies:
    """The copies that slots wait for. ``queues`` are the device's queues that the work goes to.

    Installs: ``with into(slot, adapter): queues.copy(...)``. Steps: ``reads(slots)`` before the
    launch, ``launched()`` after it.
    """

    def __init__(self, queues: DeviceQueues) -> None:
        self._queues = queues
        self._copied: dict[int, DeviceEvent] = {}
        """Slots with copies that no step has waited for yet."""
        self._read: dict[int, DeviceEvent] = {}
        """Slots that steps have read since their last copy: the last of those steps."""
        self._lock = threading.Lock()
        """Guards ``_moving``. A leaf."""
        self._reading: tuple[int, ...] = ()
        """The slots of the step that is being launched."""
        self._moving: deque[tuple[DeviceEvent, object]] = deque()
        """What copies under way read, in their order."""

    def begin(self) -> None:
        """Order all that the steps' queue has written so far (zeros, at start) before any copy."""
        self._queues.copies_wait_for(self._queues.mark_steps())

    @contextmanager
    def into(self, slot: int, source: object) -> Iterator[DeviceQueues]:
        """Copies queued inside go to ``slot``, from what ``source`` keeps."""
        self.launched()
        read = self._read.pop(slot, None)
        if read is not None and not read.done():
            self._queues.copies_wait_for(read)
        try:
            yield self._queues
        finally:  # some copies may be queued even where one was refused
            event = self._queues.mark_copies()
            self._copied[slot] = event
            with self._lock:
                self._moving.append((event, source))
        self.reap()

    def reads(self, slots: Iterable[int]) -> None:
        """A step that reads these slots is launched next."""
        self.launched()
        self._reading = tuple(slots)
        for slot in self._reading:
            copied = self._copied.pop(slot, None)
            # What is launched later lies behind this step, so one wait does for all.
            if copied is not None and not copied.done():
                self._queues.steps_wait_for(copied)

    def launched(self) -> None:
        """All of the step that was told of last has been launched, or never will be."""
        if self._reading:
            self._read.update(dict.fromkeys(self._reading, self._queues.mark_steps()))
            self._reading = ()
        self.reap()

    def reap(self) -> None:
        """Let go of what no copy reads any more. Any thread."""
        if not self._moving:
            return
        gone: list[object] = []  # let go outside the lock: an adapter's end may run anything
        with self._lock:
            while self._moving and self._moving[0][0].done():
                gone.append(self._moving.popleft())


class _Done:
    def done(self) -> bool:
        return True


class OneQueue:
    """A device whose work is done when the call returns: the CPU."""

    _DONE = _Done()

    def copy(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        for to, source in parts:
            to.copy_(source)

    def fill(self, to: torch.Tensor, value: float) -> None:
        to.fill_(value)

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark_copies(self) -> DeviceEvent:
        return self._DONE

    mark_steps = mark_copies

    def copies_wait_for(self, event: DeviceEvent) -> None:
        """Nothing runs beside anything."""

    steps_wait_for = copies_wait_for


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    def done(self) -> bool:
        ended: bool = self.event.query()
        return ended


class CudaQueues:
    """A CUDA device: copies on a stream of their own, steps on the calling thread's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        import torch

        with torch.cuda.stream(self._copies):
            land(parts, self._device)

    def fill(self, to: torch.Tensor, value: float) -> None:
        import torch

        with torch.cuda.stream(self._copies):
            to.fill_(value)

    def run(self, work: Callable[[], None]) -> None:
        import torch

        with torch.cuda.stream(self._copies):
            work()

    def mark_copies(self) -> DeviceEvent:
        return _CudaEvent(self._copies)

    def mark_steps(self) -> DeviceEvent:
        import torch

        return _CudaEvent(torch.cuda.current_stream(self._device))

    def copies_wait_for(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self._copies.wait_event(event.event)

    def steps_wait_for(self, event: DeviceEvent) -> None:
        import torch

        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self._device).wait_event(event.event)


def land(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> int:
    """Copy (to, source) on the current stream and return how many transfers that took.

    Sources are moved as they lie, then brought into the wanted layouts on the device.
    """
    import torch

    first_to, first_source = parts[0]
    if len(parts) == 1 and first_to.is_contiguous() and first_source.is_contiguous():
        first_to.copy_(first_source, non_blocking=True)
        return 1
    spans = spans_of([source for _, source in parts])
    # Its memory comes from this stream and is used again in this stream's order.
    landed = [torch.empty_like(span, device=device) for span in spans]
    for to, span in zip(landed, spans, strict=True):
        to.copy_(span, non_blocking=True)
    for to, source in parts:
        index = next(at for at, span in enumerate(spans) if _holds(span, source))
        start = source.storage_offset() - spans[index].storage_offset()
        to.copy_(landed[index].as_strided(source.size(), source.stride(), start))
    return len(spans)


def spans_of(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of the sources, dense each: one flat tensor for those side by side."""
    spans: list[torch.Tensor] = []
    for source in sources:
        last = spans[-1] if spans else None
        start, count = source.storage_offset(), source.numel()
        if last is not None and _holds(last, source, ends=True):
            start, count = last.storage_offset(), last.numel() + count
            spans.pop()
        spans.append(source.as_strided((count,), (1,), start))
    return spans


def _holds(span: torch.Tensor, source: torch.Tensor, *, ends: bool = False) -> bool:
    """Tell whether ``source`` lies in ``span``, or with ``ends`` begins where it ends."""
    same = span.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    if not same or span.dtype is not source.dtype:
        return False
    start = source.storage_offset() - span.storage_offset()
    return start == span.numel() if ends else 0 <= start < max(1, span.numel())


def queues_of(device: torch.device) -> DeviceQueues:
    """The device's own."""
    return CudaQueues(device) if device.type == "cuda" else OneQueue()
