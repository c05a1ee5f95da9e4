"""Pins the answers to requests on adapters on demand, whatever becomes of the folders.

They get the content there now, or the reason why not; there are no more loads than changes of
content, and no more unused adapters served than may be.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.frontend.adapters.adapter_folders import AdapterFolders, Folder
from mstar_tp.frontend.adapters.on_demand import OnDemand
from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.wire.values import AdapterKey

NAMES = st.sampled_from("abcd")
MOST = 2


class World(AdapterFolders):
    """Folders by name, each with a version, of which odd ones cannot be served.

    Loads and unloads that are asked for are done at once.
    """

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.served = ServedModels(("base",), "m", {})
        self.loaded: dict[AdapterKey, int] = {}
        self.tried: list[tuple[str, int]] = []
        self.used: set[str] = set()
        self.root = "/root"

    def look(self, name: str) -> Folder | None:
        version = self.versions.get(name)
        return None if version is None else Folder(name, (("x", version, 0, 0, 0),))

    async def load(self, name: str, path: str) -> None:
        version = self.versions[name]
        self.tried.append((name, version))
        await asyncio.sleep(0)
        if version % 2:
            raise ApiError.bad_request(f"version {version} is bad", code="adapter_refused")
        key = self.served.next_key(name)
        self.served.add(key, path, on_demand=True)
        self.loaded[key] = version

    def unload(self, name: str) -> None:
        self.served.forget(self.served.remove(name))

    def in_use(self, key: AdapterKey) -> bool:
        return key.name in self.used


ACTIONS = st.lists(
    st.tuples(st.just("put"), NAMES, st.integers(0, 5))
    | st.tuples(st.sampled_from(["remove", "use", "release"]), NAMES)
    | st.tuples(st.just("ask"), st.lists(NAMES, min_size=1, max_size=6)),
    max_size=20,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_what_is_in_the_folder_is_what_is_given(actions: list[Any]) -> None:
    asyncio.run(_act(actions))


async def _act(actions: list[Any]) -> None:
    world = World()
    on_demand = OnDemand(world, world.served, world, world.load, most=MOST, look_s=0.0)
    wanted_loads: list[tuple[str, int]] = []
    seen: dict[str, int | None] = {}
    for kind, *what in actions:
        if kind == "put":
            world.versions[what[0]] = what[1]
        elif kind == "remove":
            world.versions.pop(what[0], None)
        elif kind == "use":
            world.used.add(what[0])
        elif kind == "release":
            world.used.discard(what[0])
        else:
            names = what[0]
            there = {name for name in names if world.served.get(name) is not None}
            answers = await asyncio.gather(
                *(_ask(on_demand, world, name) for name in names), return_exceptions=True
            )
            for name, answer in zip(names, answers, strict=True):
                version = world.versions.get(name)
                if version is None or version % 2:
                    assert isinstance(answer, ApiError), answer
                    assert answer.status == (404 if version is None else 400)
                else:
                    assert answer == version
            for name in set(names):
                version = world.versions.get(name)
                lost = name not in there and version is not None and version % 2 == 0
                if version is not None and (seen.get(name) != version or lost):
                    wanted_loads.append((name, version))
                seen[name] = version
            assert sorted(world.tried) == sorted(wanted_loads), "no load more than there must be"
            unused = [a for a in world.served.adapters() if not world.in_use(a.key)]
            assert world.served.num_adapters <= MOST or len(unused) <= 1, "the last one asked for"


async def _ask(on_demand: OnDemand, world: World, name: str) -> int:
    """The version that the request is given, as it is resolved."""
    await on_demand.ensure(name)
    key = world.served.resolve(name)
    assert key is not None
    return world.loaded[key]
