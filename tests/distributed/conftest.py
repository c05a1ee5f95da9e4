"""One instance of two ranks for every module that breaks and loads adapters: a start costs more
than all of their tests. What each finds is checked to be left as clean as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.instance import Instance
from support.views_kit import SHORT, Driver, Views


@pytest.fixture(scope="session")
def views(tmp_path_factory: pytest.TempPathFactory) -> Views:
    return Views(tmp_path_factory.mktemp("views"))


@pytest.fixture(scope="session")
def one_slot(views: Views) -> Iterator[Instance]:
    """One device slot, and two adapters in host memory."""
    with views.start(slots=1, held=2) as instance:
        yield instance


@pytest.fixture
def driver(one_slot: Instance, views: Views) -> Iterator[Driver]:
    driver = Driver(one_slot)
    driver.evict()
    yield driver
    views.set_faults()
    driver.settled()


@pytest.fixture(scope="session")
def base(one_slot: Instance) -> list[int]:
    """The base model's answer."""
    return Driver(one_slot).answer(None).ids


@pytest.fixture(scope="session")
def whole(one_slot: Instance, base: list[int]) -> list[int]:
    """The answer on every adapter that has the weights ``a``."""
    ids = Driver(one_slot).answer("well").ids
    assert ids != base and len(ids) == SHORT.max_tokens
    return ids
