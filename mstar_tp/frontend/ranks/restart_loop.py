"""Keeps a group of ranks serving: starts it, notices its end, starts the next. Event loop's thread.

Where somebody else starts the ranks (``mstar-tp frontend``), it waits for them instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from mstar_tp.common.errors import MstarError, PeerLostError
from mstar_tp.config import ServeConfig
from mstar_tp.frontend.adapters.rank_validations import by_text
from mstar_tp.frontend.console import ServerConsole
from mstar_tp.frontend.ranks.conductor import Conductor, Phase
from mstar_tp.frontend.ranks.launcher import RankLauncher
from mstar_tp.wire.channels import FrontendLink

logger = logging.getLogger(__name__)

CAUSES_WITHIN_S = 1.0
"""After the first rank is lost, the others get this long to say why they stop."""
MORE_CAUSES_WITHIN_S = 0.25
"""After a rank said why, or was killed, the others get this long to say the same or more."""
STEADY_AFTER_S = 5.0
"""Ranks that have served for this long, or have ended every request that they took over, were
started well: failures are counted anew.
"""
BACK_OFF_S = 0.5
"""Before the second start in a row; twice as long before each further one."""
MAX_BACK_OFF_S = 30.0
SIGN_EVERY_S = 3.0
"""How often clients get a sign of life while the ranks are down."""
RANKS_STOP_S = 20.0
"""Ranks that were told to stop are ended by force after this long."""


class RestartLoop:
    """``worker_args``: of each rank's command line but for the file through which ranks meet."""

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
        self._config = config
        self._link = link
        self._conductor = conductor
        self._console = console
        self._worker_args = worker_args
        self._launcher = RankLauncher(self._on_line, conductor.lose) if start_ranks else None
        self._failures = 0
        """Groups in a row that ended before they had served for a while."""

    async def run(self, run_dir: Path, on_serving: Callable[[], None]) -> None:
        """Until cancelled. ``on_serving`` is called whenever a group begins to serve.

        Raises:
            MstarError: no further group is started; why, rank by rank.
        """
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._start(run_dir)
                if await self._await_ready():
                    ready_at = clock()
                    on_serving()
                    await self._conductor.changed.wait()
                    # What kills ranks may be a request: those they took over are done with.
                    if self._conductor.requests.carried_all or clock() - ready_at >= STEADY_AFTER_S:
                        self._failures = 0
            except PeerLostError as error:
                self._conductor.lose(0, str(error))
            await self._end_group()

    async def stop(self) -> None:
        """Tell ranks that serve to stop, and leave none of those started here."""
        serving = self._conductor.serves and not self._conductor.changed.is_set()
        self._conductor.send_shutdown()
        if self._launcher is not None:
            await self._launcher.stop(RANKS_STOP_S if serving else 0.0)

    # ------------------------------------------------------------------ one group's life

    async def _start(self, run_dir: Path) -> None:
        world_size = self._config.engine.tensor_parallel_size
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        first = self._conductor.phase is Phase.STARTING and not self._failures
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
        """Until every rank serves (True), or one is lost.

        Raises:
            PeerLostError: those that this process started are not ready in time.
        """
        conductor, limit_s = self._conductor, self._config.engine.start_timeout_s
        waits = (conductor.became_ready, conductor.changed)
        with self._signs_of_life():
            try:
                async with asyncio.timeout(limit_s):
                    await any_set(*waits)
            except TimeoutError:
                text = f"the ranks were not ready within {limit_s:g} s"
                if self._launcher is not None:
                    raise PeerLostError(f"{text}: raise --start-timeout") from None
                if conductor.phase is Phase.DOWN:
                    conductor.phase = Phase.STARTING
                    conductor.fail_all(text)
                await any_set(*waits)
        return not conductor.changed.is_set()

    async def _end_group(self) -> None:
        """A rank is gone: end the others, and be ready for the next group, unless there is none.

        Raises:
            MstarError: there is none.
        """
        conductor, link = self._conductor, self._link
        if conductor.fault is None and not conductor.dismissed:
            await self._collect_causes()
        reason = self._why()
        if self._launcher is not None:
            await self._launcher.kill()
            logger.info("the ranks are ended")
            self._failures += 1
        if self._gives_up():
            conductor.die()
            raise MstarError(reason)
        if conductor.dismissed:
            gone = "The ranks were asked to stop"
        else:
            gone = "The ranks are gone"
            logger.error("%s", reason)
        # All at once, in this order: nothing of the old group can come after the tables are
        # cleared, and nothing of the new one before.
        link.take_received()
        conductor.await_ranks()
        link.begin_epoch()
        if self._launcher is None:
            self._console.say(f"{gone}: waiting for them to be started again")
        else:
            self._console.say(f"{gone}: starting them again (start {link.epoch})")
            await self._back_off()

    async def _collect_causes(self) -> None:
        """The first to be lost is seldom the cause: the others get a moment to say more."""
        conductor, clock = self._conductor, asyncio.get_running_loop().time
        world_size = self._config.engine.tensor_parallel_size
        deadline = clock() + CAUSES_WITHIN_S
        while len(conductor.causes) < world_size and clock() < deadline:
            conductor.changed.clear()
            if conductor.causes or self._was_killed():
                deadline = min(deadline, clock() + MORE_CAUSES_WITHIN_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(conductor.changed.wait(), deadline - clock())
        conductor.changed.set()

    def _was_killed(self) -> bool:
        return any("signal" in how for how in self._conductor.losses.values())

    def _gives_up(self) -> bool:
        """Whether starting ranks again would be in vain."""
        conductor, most = self._conductor, self._config.server.max_restarts
        if conductor.fault is not None:
            return True
        if self._launcher is None:
            return False
        # What a rank itself has to say against the first start is wrong with what it was given.
        refused = conductor.phase is Phase.STARTING and bool(conductor.causes)
        return (refused and not self._was_killed()) or self._failures > most

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
                self._conductor.requests.keep_open()

        signs = asyncio.ensure_future(give())
        try:
            yield
        finally:
            signs.cancel()

    # ------------------------------------------------------------------ words

    def _why(self) -> str:
        """Why the ranks do not serve, a line a cause."""
        conductor = self._conductor
        if conductor.fault is not None:
            return conductor.fault
        world_size = self._config.engine.tensor_parallel_size
        lines = by_text(conductor.told().items(), world_size, named=True)
        if conductor.causes:
            return "\n".join(lines)
        if self._launcher is not None and self._launcher.last_lines():
            lines += ["Their last lines:", self._launcher.last_lines()]
        return "\n".join(lines)

    def _on_line(self, line: str) -> None:
        """A rank's own log. Its errors at start come as reports too, and are shown once."""
        is_error = " ERROR " in line or '"level": "ERROR"' in line
        if self._conductor.phase is Phase.STARTING and is_error:
            return
        self._console.log(line)


async def any_set(*events: asyncio.Event) -> None:
    """Until one of ``events`` is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
