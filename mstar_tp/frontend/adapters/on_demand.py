"""Adapters that are loaded because a request names them, and looked at again as they change.

The content of the folder is served. A request on a folder that nobody looked at within ``LOOK_S``
looks at it; where its files are others than before, they are loaded in its place first, as a new
generation, and earlier requests end on the old one. A folder that was refused is not tried again
before it changes, or ``RETRY_S`` went by. Of many requests at once for one name, one looks and one
loads. The event loop owns the tables; the disk is read on a few threads of its own. Where storage
hangs, served adapters stay as they are, and requests on others are answered 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from mstar_tp.frontend.adapters.adapter_folders import (
    AdapterFolders,
    Folder,
    RootGoneError,
    may_name,
)
from mstar_tp.frontend.adapters.served_models import ServedAdapter, ServedModels
from mstar_tp.frontend.api.api_errors import ApiError, no_such_model, unavailable
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""The age in seconds up to which a look at a folder serves further requests."""
LOOK_WITHIN_S = 30.0
"""The seconds that a request waits for a look at the folder of an adapter not served yet."""
WAIT_S = 1.0
"""The seconds that a request waits for a look at the folder of an adapter that is served."""
RETRY_S = 300.0
"""The seconds after which an unchanged folder that was refused is tried again.

The fault may have been the disk's.
"""
SCAN_S = 2.0
"""The least seconds between two listings of the root."""
SCAN_SHARE = 20
"""Listings take at most one part in so many of a thread's time."""
MAX_REMEMBERED = 10_000
"""The most names whose looks are remembered, served or not."""
THREADS = 4

Load = Callable[[str, str], Awaitable[None]]
"""A function that checks and serves the adapter in a folder as a name. Raises ApiError."""


class Adapters(Protocol):
    """The part of ``AdapterLoads`` that is used here."""

    def unload(self, name: str) -> None: ...
    def in_use(self, key: AdapterKey) -> bool: ...


@dataclass(slots=True)
class _Known:
    """A folder as it was when it was last looked at."""

    folder: Folder | None
    looked_at: float
    served: Folder | None = None
    """The folder as it was when it was loaded."""
    refusal: ApiError | None = None
    """The error for which the present content is not served."""
    refused_at: float = 0.0


class OnDemand:
    """The adapters that requests load, and what is known of their folders."""

    def __init__(
        self,
        folders: AdapterFolders,
        served: ServedModels,
        adapters: Adapters,
        load: Load,
        *,
        most: int,
        look_s: float = LOOK_S,
        look_within_s: float = LOOK_WITHIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``load`` is told names and paths; ``most`` adapters stay served that nobody uses."""
        self._folders = folders
        self._served = served
        self._adapters = adapters
        self._load = load
        self._most = most
        self._look_s = look_s
        self._look_within_s = look_within_s
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """name -> its folder as last seen, least recently named first."""
        self._looking: dict[str, tuple[asyncio.Task[RootGoneError | None], float]] = {}
        """name -> a look in flight, and when it began."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()
        """name -> the number of requests in ``ensure``."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lora-look")
        self.listed: tuple[str, ...] = ()
        """The names of the folders in the root, as of the last listing."""
        self._gone = ""
        """The reason why the root cannot be read, where it was logged already."""

    # ------------------------------------------------------------------ requests

    async def ensure(self, name: str) -> None:
        """Serve the content that the folder ``name`` has now.

        Returns with it served, or, where the name is not this class's to serve, without having run
        anything.

        Raises:
            ApiError: 404, there is no such folder; 4xx, it cannot be served; 503, not now.
        """
        if not self._mine(name):
            return
        if not may_name(name):
            raise no_such_model(name)
        self._waiting[name] += 1
        try:
            await self._ensure(name)
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
            self._trim(keep=name)

    async def _ensure(self, name: str) -> None:
        known = await self._look(name, patient=self._served.get(name) is None)
        if known is None:
            return  # its storage hangs, and it is served
        while self._mine(name):
            if (loading := self._loading.get(name)) is not None:
                await asyncio.wait({loading})
                error = loading.exception()
                if isinstance(error, ApiError) and error.status < 500:
                    continue  # it is in the table now, unless the folder is another by now
                if error is not None:
                    raise _again(error)
                continue
            if known.folder is None:
                self._drop(name, "its folder is gone")
                raise no_such_model(name)
            if known.refusal is not None:
                raise _again(known.refusal)
            if known.served == known.folder and self._served.get(name) is not None:
                return
            task = asyncio.ensure_future(self._load_now(name, known, known.folder))
            task.add_done_callback(_seen)
            self._loading[name] = task

    async def _look(self, name: str, *, patient: bool) -> _Known | None:
        """Return the folder, looked at ``look_s`` ago at most.

        None stands for a look that takes too long for a request that is not ``patient``.

        Raises:
            ApiError: 503, the root cannot be read, or its storage hangs.
        """
        known = self._known.get(name)
        if known is not None and self._clock() - known.looked_at < self._look_s:
            self._known.move_to_end(name)
            return known
        if name not in self._looking:
            task = asyncio.ensure_future(self._look_now(name))
            self._looking[name] = (task, self._clock())
        task, begun = self._looking[name]
        within_s = self._look_within_s if patient else WAIT_S
        left_s = max(0.0, within_s - (self._clock() - begun))
        done, _ = await asyncio.wait({task}, timeout=left_s)
        if not done and patient:
            raise unavailable(
                f"the adapters' folder could not be read within {within_s:g} s: try again later"
            )
        if not done:
            return None
        if (gone := task.result()) is not None:
            if not patient:
                return None
            raise unavailable(f"the adapters' folder {gone}: try again later")
        return self._known[name]

    async def _look_now(self, name: str) -> RootGoneError | None:
        """Note the folder's state; return the error where the root cannot be read."""
        loop = asyncio.get_running_loop()
        try:
            folder = await loop.run_in_executor(self._threads, self._folders.look, name)
        except RootGoneError as error:
            return error
        finally:
            del self._looking[name]
        now, known = self._clock(), self._known.get(name)
        if known is None:
            known = self._known[name] = _Known(folder, now)
        if known.folder != folder or now - known.refused_at > RETRY_S:
            known.refusal = None
        known.folder, known.looked_at = folder, now
        self._known.move_to_end(name)
        self._forget_some()
        return None

    async def _load_now(self, name: str, known: _Known, folder: Folder) -> None:
        try:
            await self._load(name, folder.path)
        except ApiError as error:
            error.param, error.message = "model", error.message.removeprefix("lora_path: ")
            if error.status < 500:
                self._refuse(name, known, folder, error)
            raise
        else:
            known.served = folder
        finally:
            del self._loading[name]

    def _refuse(self, name: str, known: _Known, folder: Folder, error: ApiError) -> None:
        """Note that the content of ``folder`` cannot be served; it may have changed since."""
        logger.warning("adapter %r is not served on demand: %s", name, error.message)
        self._drop(name, "its folder holds what cannot be served")
        if known.folder == folder:
            known.refusal, known.refused_at = error, self._clock()

    # ------------------------------------------------------------------ what goes

    def _mine(self, name: str) -> bool:
        """Return whether ``name`` is served on demand, or not at all."""
        if name in self._served.base_names:
            return False
        adapter = self._served.get(name)
        return adapter is None or adapter.on_demand

    def _drop(self, name: str, why: str) -> None:
        adapter = self._served.get(name)
        if adapter is not None and adapter.on_demand:
            logger.info("adapter %s is served no more: %s", adapter.key, why)
            self._adapters.unload(name)

    def _trim(self, keep: str = "") -> None:
        """Unload the adapters unused for longest beyond the most that may stay; not ``keep``."""
        excess = self._served.num_on_demand - self._most
        if excess <= 0:
            return
        place = {name: number for number, name in enumerate(self._known)}
        oldest_first = sorted(
            self._served.on_demand(), key=lambda adapter: place.get(adapter.key.name, -1)
        )
        for adapter in oldest_first:
            name = adapter.key.name
            used = self._waiting[name] > 0 or self._adapters.in_use(adapter.key)
            if excess and name != keep and not used and not adapter.limits.pinned:
                self._drop(name, f"{self._most} others were used since")
                excess -= 1

    def _forget_some(self) -> None:
        """Forget the folders that nobody named for long."""
        if len(self._known) <= MAX_REMEMBERED:
            return
        for name in list(self._known):
            if self._served.get(name) is None and not self._waiting[name]:
                del self._known[name]
            if len(self._known) <= MAX_REMEMBERED:
                return

    # ------------------------------------------------------------------ watching

    def restored(self, adapter: ServedAdapter) -> None:
        """Note an adapter that was loaded on demand before the server was started again.

        Blocks on the disk: called before the loop serves anybody.
        """
        with contextlib.suppress(RootGoneError):  # then the first request loads it anew
            folder = self._folders.look(adapter.key.name)
            self._known[adapter.key.name] = _Known(folder, self._clock(), served=folder)

    def refusal_of(self, name: str) -> str | None:
        """Return why the folder ``name`` is not served, if it was tried."""
        known = self._known.get(name)
        return None if known is None or known.refusal is None else known.refusal.message

    async def scan(self) -> None:
        """List the root, and stop serving loaded adapters whose folder is gone."""
        loop = asyncio.get_running_loop()
        try:
            self.listed = tuple(await loop.run_in_executor(self._threads, self._folders.names))
        except RootGoneError as error:
            self.listed = ()
            self._note_gone(str(error))
            return
        self._gone = ""
        self._trim()
        for adapter in self._served.on_demand():
            name = adapter.key.name
            try:
                folder = await loop.run_in_executor(self._threads, self._folders.look, name)
            except RootGoneError as error:
                self._note_gone(str(error))
                return
            if folder is None and not self._waiting[name] and name not in self._loading:
                self._drop(name, "its folder is gone")

    def _note_gone(self, why: str) -> None:
        if why != self._gone:
            logger.warning("%s: what is loaded stays served, and nothing else is loaded", why)
        self._gone = why

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """List the root again and again meanwhile."""

        async def watch() -> None:
            while True:
                begun = self._clock()
                try:
                    await self.scan()
                except Exception:
                    logger.exception("the adapters' folder cannot be listed")
                await asyncio.sleep(max(SCAN_S, SCAN_SHARE * (self._clock() - begun)))

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()
            self._threads.shutdown(wait=False, cancel_futures=True)


def _again(error: BaseException) -> BaseException:
    """Return a copy to raise for another request: an exception raised again and again grows."""
    if not isinstance(error, ApiError):
        return error
    return ApiError(
        error.status,
        error.message,
        type=error.type,
        param=error.param,
        code=error.code,
        headers=error.headers,
    )


def _seen(task: asyncio.Task[None]) -> None:
    """Mark a load's failure as seen: those who wait are told, and none may be left."""
    if not task.cancelled():
        task.exception()
