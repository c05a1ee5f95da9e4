"""What tests of every folder may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.browser import NAMES, chromium, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium; where there is none, the test is skipped."""
    path = find_chromium()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on PATH: install one (apt install chromium)")
    with chromium(path) as browser:
        yield browser
