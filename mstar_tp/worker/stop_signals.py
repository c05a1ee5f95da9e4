"""Signals that ask a serving rank to stop, which it passes on to whoever decides when.

torchrun passes SIGTERM and SIGINT on to its ranks, and kills them 30 s later. A rank that ended at
once would take running requests with it. The process's main thread.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(tell: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end nothing within the block, but call ``tell``.

    It is called for each signal on a thread of its own, which may take locks. Child processes that
    run another program get the signals as ever. Outside the main thread, where Python takes no
    signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The handler itself runs between any two instructions of the main thread, which may hold any
    # lock: so it does nothing, and what Python writes for it into the socket is read elsewhere.
    read, write = socket.socketpair()
    write.setblocking(False)

    def listen() -> None:
        while numbers := read.recv(64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    tell(signal.Signals(number))

    thread = threading.Thread(target=listen, name="stop-signals", daemon=True)
    thread.start()
    # A full socket has unread signals in it: one more says nothing new.
    fd_before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    before = [(number, signal.signal(number, _do_nothing)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(fd_before)
        write.shutdown(socket.SHUT_RDWR)  # a forked child may hold it, too
        write.close()
        thread.join()
        read.close()


def _do_nothing(number: int, frame: object) -> None:
    """Being there is enough."""
