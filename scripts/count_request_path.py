"""Counts the package's files and functions that one streamed chat request crosses in the frontend.

The frontend runs in this process, before ranks that follow a script: what a rank's own process
crosses is not counted. One request is sent as a warm-up; the one that is counted asks for four
tokens of a resident adapter. Run it as ``python scripts/count_request_path.py [--list]``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import support_path  # noqa: F401
from support.api_kit import Api

import mstar_tp

PACKAGE = str(Path(mstar_tp.__file__).parent)


class Crossed:
    """The functions of the package that were entered while counting was on, in any thread."""

    def __init__(self) -> None:
        self.on = False
        self.not_counted: set[int | None] = set()
        """Identities of the fake ranks' threads, which use the package's messages too."""
        self.functions: set[tuple[str, str, int]] = set()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or threading.get_ident() in self.not_counted:
            return
        if code.co_filename.startswith(PACKAGE):
            name = (code.co_filename[len(PACKAGE) + 1 :], code.co_qualname, code.co_firstlineno)
            self.functions.add(name)


def ask(api: Api) -> None:
    """Send one streamed chat request on the adapter, and read its answer to the end."""
    with api.client() as client:
        stream = client.chat.completions.create(
            model="pirate",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            stream=True,
        )
        assert len(list(stream)) > 0, "the answer was empty"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function")
    options = parser.parse_args()
    crossed = Crossed()
    # Threads take their profile function when they start: it is set before there are any.
    threading.setprofile(crossed.profile)
    with tempfile.TemporaryDirectory() as folder:
        api = Api(Path(folder))
        ask(api)
        crossed.not_counted = {thread.ident for thread in api.ranks._threads}
        crossed.on = True
        ask(api)
        crossed.on = False
        found = sorted(crossed.functions)
        files = {file for file, _, _ in found}
        print(f"frontend process: {len(files)} files, {len(found)} functions")
        if options.list:
            for file, name, line in found:
                print(f"{file}:{line} {name}")
        sys.stdout.flush()
        api.close()


if __name__ == "__main__":
    main()
