"""The system's Chromium without a window, for tests and pictures of the status page.

Needs the package ``playwright`` (extra ``dev``), which brings no browser of its own here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The first of ``NAMES`` on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """``path`` running. No ``asyncio.run`` on this thread within the block."""
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root cannot have
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=sandbox)
        try:
            yield browser
        finally:
            browser.close()
