"""Threads that run one at a time, in an order that a test chooses: interleavings by the seed.

A *task* is a real thread. It runs until it would wait (for a message, a lock, another rank) and
then gives its turn back; the test's own thread, which owns ``Interleaving``, says who goes on.
Between two turns nothing runs, so every run with the same choices is the same run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import Any, Generic, TypeVar

from mstar_tp.common.errors import PeerLostError
from mstar_tp.engine.step.step_thread import StepThread
from mstar_tp.worker.fence import AdmitFence
from mstar_tp.worker.waker import Poller
from support.thread_group import ThreadGroups, _Round

T = TypeVar("T")


class Ended(BaseException):
    """Raised in tasks that still wait when the test is over."""


class _Task:
    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.what = "its first turn"
        self.done = False
        self.error: BaseException | None = None


class Interleaving:
    """Owned by the test's thread; tasks call ``wait_for`` only."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        """Those that have not ended, in the order they were started."""
        self.errors: dict[str, BaseException] = {}
        """What ended tasks early."""
        self._here = threading.local()
        self._back = threading.Semaphore(0)
        self._closing = False

    def start(self, name: str, main: Callable[[], None]) -> None:
        """Add a task; it waits for its first turn."""
        task = self._tasks[name] = _Task(name)
        threading.Thread(target=self._main, args=(task, main), name=name, daemon=True).start()

    def ready(self) -> list[str]:
        """Tasks that could go on now, in the order they were started."""
        return [task.name for task in self._tasks.values() if task.ready()]

    def run(self, name: str) -> None:
        """One turn of a task: until it waits again or ends."""
        task = self._tasks[name]
        assert task.ready(), f"{name} waits for {task.what}"
        self._let(task)

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Yield to the other tasks until ``ready`` holds and the test says to go on.

        The test's own thread never waits: there it must hold already.
        """
        task: _Task | None = getattr(self._here, "task", None)
        if task is None:
            assert ready(), f"the test's own thread would wait for {what}"
            return
        if self._closing:
            raise Ended
        task.ready, task.what = ready, what
        self._back.release()
        task.go.acquire()
        if self._closing:
            raise Ended

    def pause(self) -> None:
        """Give the turn back, ready to go on."""
        self.wait_for(lambda: True, "its next turn")

    def waits(self) -> dict[str, str]:
        """The waits of each task that has not ended."""
        return {task.name: task.what for task in self._tasks.values()}

    def close(self) -> None:
        """End every task."""
        self._closing = True
        while self._tasks:
            self._let(next(iter(self._tasks.values())))

    def _let(self, task: _Task) -> None:
        """Give ``task`` a turn and wait for its end."""
        task.go.release()
        self._back.acquire()
        if task.done:
            del self._tasks[task.name]
            if task.error is not None:
                self.errors[task.name] = task.error

    def _main(self, task: _Task, main: Callable[[], None]) -> None:
        self._here.task = task
        task.go.acquire()
        try:
            if not self._closing:
                main()
        except Ended:
            pass  # the test is over
        except BaseException as error:
            task.error = error
        finally:
            task.done = True
            self._back.release()


class InterleavedLock:
    """A lock that is a place to give the turn back, so whatever it guards is interleaved too."""

    def __init__(self, interleaving: Interleaving, name: str) -> None:
        self._interleaving = interleaving
        self._name = name
        self._held = False

    def __enter__(self) -> None:
        self._interleaving.wait_for(lambda: not self._held, self._name)
        self._held = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False


class InterleavedCondition:
    """A condition whose ``wait`` yields until it is notified, and never times out.

    Its lock guards nothing more than the interleaving does.
    """

    def __init__(self, interleaving: Interleaving, name: str) -> None:
        self._interleaving = interleaving
        self._name = name
        self._notified = 0

    def __enter__(self) -> None:
        """Free at once: nobody gives a turn back while holding it but to wait."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to release."""

    def wait(self, timeout: float | None = None) -> None:
        seen = self._notified
        self._interleaving.wait_for(lambda: self._notified != seen, self._name)

    def notify_all(self) -> None:
        self._notified += 1


class InterleavedEvent(threading.Event):
    """An event whose ``wait`` gives the turn back, and never times out."""

    def __init__(self, interleaving: Interleaving, name: str) -> None:
        super().__init__()
        self._interleaving = interleaving
        self._name = name

    def wait(self, timeout: float | None = None) -> bool:
        self._interleaving.wait_for(self.is_set, self._name)
        return True


class InterleavedQueue(Generic[T]):
    """A queue whose ``get`` gives the turn back until there is something."""

    def __init__(self, interleaving: Interleaving, name: str) -> None:
        self._interleaving = interleaving
        self._name = name
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> T:
        """Get an item; a ``timeout`` passes when the test says so."""
        if timeout is None:
            self._interleaving.wait_for(lambda: bool(self._items), self._name)
        else:
            self._interleaving.pause()
            if not self._items:
                raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self) -> T:
        if not self._items:
            raise Empty
        return self._items.popleft()


class InterleavedFence(AdmitFence):
    """The fence, whose waits yield; so does the step thread around each of its signs."""

    def __init__(self, interleaving: Interleaving) -> None:
        super().__init__()
        self._interleaving = interleaving

    def settle(self, tp_seq: int) -> None:
        self._interleaving.pause()
        super().settle(tp_seq)
        self._interleaving.pause()

    def finish(self, tp_seq: int) -> None:
        self._interleaving.pause()
        super().finish(tp_seq)
        self._interleaving.pause()

    def _wait(self, reached: Callable[[], bool], what: str, waiter: str) -> None:
        self._interleaving.wait_for(lambda: reached() or self._closed, f"{waiter} waits for {what}")


class InterleavedSteps(StepThread):
    """The step thread as a task."""

    def __init__(self, interleaving: Interleaving, name: str, *args: Any) -> None:
        super().__init__(*args)
        self._interleaving = interleaving
        self._name = name
        self._work = InterleavedQueue(interleaving, "a step")  # type: ignore[assignment]

    def start(self) -> None:
        self._interleaving.start(self._name, self._loop)

    def _settle(self, tp_seq: int) -> None:
        super()._settle(tp_seq)
        # The main thread may go on from here, whatever the step comes to.
        self._interleaving.wait_for(lambda: True, f"the launch of step {tp_seq}")


class InterleavedReadback:
    """Tokens that are on their way to the host until the test says that they are there."""

    def __init__(self, interleaving: Interleaving, tokens: Any) -> None:
        self._interleaving = interleaving
        self._tokens = tokens.clone()

    def done(self) -> bool:
        return True

    def wait(self) -> list[int]:
        self._interleaving.pause()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class InterleavedWaker:
    """A main thread's waker, whose poller yields until something it polls is ``ready``."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self._woken = False

    def poller(self, *sockets: Any) -> Poller:
        return _InterleavedPoller(self._interleaving, [*sockets, self])

    def ready(self) -> bool:
        return self._woken

    def wake(self) -> None:
        self._woken = True

    def clear(self) -> None:
        self._woken = False

    def close(self) -> None:
        self._woken = False


class _InterleavedPoller:
    def __init__(self, interleaving: Interleaving, sockets: list[Any]) -> None:
        self._interleaving = interleaving
        self._sockets = sockets

    def poll(self, timeout: int | None = None) -> list[Any]:
        self._interleaving.wait_for(lambda: any(s.ready() for s in self._sockets), "a message")
        return [s for s in self._sockets if s.ready()]


class InterleavedGroups(ThreadGroups):
    """Groups whose rendezvous gives the turn back until every rank has come."""

    def __init__(self, interleaving: Interleaving, world_size: int) -> None:
        super().__init__(world_size)
        self._interleaving = interleaving

    def _enter(self, rank: int, call: str, value: Any) -> list[tuple[str, Any]]:
        this = self._round
        this.entered[rank] = (call, value)
        this.missing -= 1
        if this.missing == 0:
            self._round = _Round(self.world_size)
        self._interleaving.wait_for(
            lambda: self._round is not this or self._broken, f"ranks in {call}"
        )
        if self._round is this:
            raise PeerLostError(f"rank {rank} waited in {call} for a rank that failed")
        return this.entered
