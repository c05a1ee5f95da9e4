"""The restart loop: it starts a group of ranks, notices its end and starts the next.

It runs on the event loop's thread. Where somebody else starts the ranks (``mstar-tp frontend``),
it waits for them instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from mstar_tp.common.errors import MstarError, PeerLostError
from mstar_tp.config import ServeConfig
from mstar_tp.frontend.console import ServerConsole
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.ranks.group_state import Phase, Service
from mstar_tp.frontend.ranks.launcher import RankLauncher
from mstar_tp.wire.channels import FrontendLink

logger = logging.getLogger(__name__)

CAUSES_WITHIN_S = 1.0
"""The seconds that the other ranks get to say why they stop, after the first is lost."""
MORE_CAUSES_WITHIN_S = 0.25
"""The seconds that the others get to say more, after a rank said why or was killed."""
STEADY_AFTER_S = 5.0
"""The seconds after which ranks that serve were started well: failures are counted anew.

So they are once every request is ended that the ranks took over.
"""
BACK_OFF_S = 0.5
"""The seconds before the second start in a row; they double before each further one."""
MAX_BACK_OFF_S = 30.0
SIGN_EVERY_S = 3.0
"""The seconds between two signs of life that clients get while the ranks are down."""
RANKS_STOP_S = 20.0
"""The seconds after which ranks that were told to stop are ended by force."""


class RestartLoop:
    """The owner of the ranks' processes, where this process starts them."""

    def __init__(
        self,
        config: ServeConfig,
        link: FrontendLink,
        conductor: Conductor,
        console: ServerConsole,
        *,
        start_ranks: bool,
        worker_args: Callable[[Path], list[str]],
    ) -> None:
        """``worker_args`` makes the ranks' command line, but for the file through which they meet.

        It is given the server's run folder.
        """
        self._config = config
        self._link = link
        self._requests = conductor.requests
        self._group = conductor.group
        self._state = conductor.state
        self._console = console
        self._worker_args = worker_args
        self._launcher = RankLauncher(self._on_line, self._group.lose) if start_ranks else None
        self._failures = 0
        """The groups in a row that ended before they had served for a while."""

    async def run(self, run_dir: Path, on_serving: Callable[[], None]) -> None:
        """Keep ranks serving until cancelled; ``on_serving`` is called whenever a group serves.

        Raises:
            MstarError: no further group is started; its text says why, rank by rank.
        """
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._start(run_dir)
                if await self._await_ready():
                    ready_at = clock()
                    on_serving()
                    await self._group.changed.wait()
                    # What kills ranks may be a request: those they took over are done with.
                    if self._requests.carried_all or clock() - ready_at >= STEADY_AFTER_S:
                        self._failures = 0
            except PeerLostError as error:
                self._group.lose(0, str(error))
            await self._end_group()

    async def stop(self) -> None:
        """Tell ranks that serve to stop, and leave no process of those started here."""
        serving = self._state.serves and not self._group.changed.is_set()
        self._group.send_shutdown()
        if self._launcher is not None:
            await self._launcher.stop(RANKS_STOP_S if serving else 0.0)

    # ------------------------------------------------------------------ one group's life

    async def _start(self, run_dir: Path) -> None:
        world_size = self._config.engine.tensor_parallel_size
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        first = self._state.service is Service.STARTING and not self._failures
        if self._launcher is None:
            if first:
                self._console.say(f"Waiting for {ranks} at {self._link.address}")
            return
        if first:
            self._console.say(f"Starting {ranks}")
        epoch = self._link.epoch
        args = [*self._worker_args(run_dir), "--store", str(run_dir / f"ranks-{epoch}")]
        await self._launcher.start(epoch, world_size, args, run_dir)

    async def _await_ready(self) -> bool:
        """Wait until every rank serves (True), or one is lost (False).

        Raises:
            PeerLostError: ranks that this process started are not ready in time.
        """
        group, limit_s = self._group, self._config.engine.start_timeout_s
        waits = (group.became_ready, group.changed)
        with self._signs_of_life():
            try:
                async with asyncio.timeout(limit_s):
                    await any_set(*waits)
            except TimeoutError:
                text = f"the ranks were not ready within {limit_s:g} s"
                if self._launcher is not None:
                    raise PeerLostError(f"{text}: raise --start-timeout") from None
                if self._state.service is Service.DOWN:
                    group.time_out(text)
                await any_set(*waits)
        return not group.changed.is_set()

    async def _end_group(self) -> None:
        """End what is left of the group, and be ready for the next, unless there is none.

        Raises:
            MstarError: there is none.
        """
        dismissed = self._state.phase is Phase.DISMISSED
        if self._state.causes.fault is None and not dismissed:
            await self._collect_causes()
        reason = self._why()
        if self._launcher is not None:
            await self._launcher.kill()
            logger.info("the ranks are ended")
            self._failures += 1
        if self._gives_up():
            self._group.die()
            raise MstarError(reason)
        if dismissed:
            gone = "The ranks were asked to stop"
        else:
            gone = "The ranks are gone"
            logger.error("%s", reason)
        # All at once, in this order: nothing of the old group can come after the tables are
        # cleared, and nothing of the new one before.
        self._link.take_received()
        self._group.await_next()
        self._link.begin_epoch()
        if self._launcher is None:
            self._console.say(f"{gone}: waiting for them to be started again")
        else:
            self._console.say(f"{gone}: starting them again (start {self._link.epoch})")
            await self._back_off()

    async def _collect_causes(self) -> None:
        """Give the other ranks a moment to say why: the first to be lost is seldom the cause."""
        causes, changed = self._state.causes, self._group.changed
        clock = asyncio.get_running_loop().time
        world_size = self._config.engine.tensor_parallel_size
        deadline = clock() + CAUSES_WITHIN_S
        while len(causes.said) < world_size and clock() < deadline:
            changed.clear()
            if causes.said or causes.killed:
                deadline = min(deadline, clock() + MORE_CAUSES_WITHIN_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), deadline - clock())
        changed.set()

    def _gives_up(self) -> bool:
        """Return whether starting ranks again would be in vain."""
        causes, most = self._state.causes, self._config.server.max_restarts
        if causes.fault is not None:
            return True
        if self._launcher is None:
            return False
        # What a rank itself has to say against the first start is wrong with what it was given.
        refused = self._state.service is Service.STARTING and bool(causes.said)
        return (refused and not causes.killed) or self._failures > most

    async def _back_off(self) -> None:
        if self._failures > 1:
            wait_s = min(BACK_OFF_S * 2 ** (self._failures - 2), MAX_BACK_OFF_S)
            with self._signs_of_life():
                await asyncio.sleep(wait_s)

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        async def give() -> None:
            while True:
                await asyncio.sleep(SIGN_EVERY_S)
                self._requests.keep_open()

        signs = asyncio.ensure_future(give())
        try:
            yield
        finally:
            signs.cancel()

    # ------------------------------------------------------------------ words

    def _why(self) -> str:
        """Return why the ranks do not serve, a line a cause."""
        causes = self._state.causes
        if causes.fault is not None:
            return causes.fault
        lines = causes.lines()
        if not causes.said and self._launcher is not None and self._launcher.last_lines():
            lines += ["Their last lines:", self._launcher.last_lines()]
        return "\n".join(lines)

    def _on_line(self, line: str) -> None:
        """Show a line that a rank logged; errors at the first start come as reports too."""
        is_error = " ERROR " in line or '"level": "ERROR"' in line
        if self._state.service is Service.STARTING and is_error:
            return
        self._console.log(line)


async def any_set(*events: asyncio.Event) -> None:
    """Wait until one of ``events`` is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
