"""Running a command that writes a result and ends: what its user sees, whatever ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

_TERMINATED = 128 + signal.SIGTERM


def run_offline(work: Callable[[], str]) -> int:
    """Print the sentence that ``work`` returns; the exit code. Ctrl-C and SIGTERM end it cleanly:
    what it was writing is removed. Called on the main thread.
    """

    def end(signum: int, frame: object) -> None:
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        print(work())
        return 0
    except (KeyboardInterrupt, SystemExit):
        print("stopped: nothing was written", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
