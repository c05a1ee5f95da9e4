"""Tests whose ranks are threads leave torch's module-level flags as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings
from support.thread_group import dispatch_flags_restored

settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.fixture(autouse=True)
def _dispatch_flags() -> Iterator[None]:
    with dispatch_flags_restored():
        yield
