"""One rank from start to end: join the group, load, say ready, run its role's loop, leave cleanly.

Main thread. Whatever ends a rank early is reported to the frontend in one sentence before the
process exits non-zero, so that the group is stopped and a person sees why.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch
import zmq

from mstar_tp.common.env import RankEnv, rank_env
from mstar_tp.common.errors import ConfigError, PeerLostError
from mstar_tp.common.version import VERSION
from mstar_tp.config import EngineConfig, ServeConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.distributed.start import (
    Rendezvous,
    destroy_groups,
    env_rendezvous,
    file_rendezvous,
    group_name,
    init_groups,
    lookup,
    publish,
)
from mstar_tp.engine.build import Engine, build_engine
from mstar_tp.engine.sampling.grammar import Grammars
from mstar_tp.engine.scheduling.fair_queue import fair_queue_of
from mstar_tp.engine.scheduling.scheduler import Scheduler
from mstar_tp.engine.start_votes import OtherRankFailedError, voted
from mstar_tp.engine.step.deferred_runner import DeferredRunner
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_thread import RunStep, StepResult, StepThread, WakeAt
from mstar_tp.recording import NO_RECORDING, FileRecorder, Recorder, recording_path
from mstar_tp.wire.channels import Bind, ConductorLink, Context, ScheduleClient, ScheduleServer
from mstar_tp.wire.curve import Curve
from mstar_tp.wire.handshake import Hello
from mstar_tp.wire.reports import CopyIn, Fatal, Leaving, Progress, StartFailed
from mstar_tp.wire.schedule import Step
from mstar_tp.worker.fault_points import NO_FAULTS, RankFaults
from mstar_tp.worker.fence import AdmitFence
from mstar_tp.worker.follower import Follower
from mstar_tp.worker.leader import Leader
from mstar_tp.worker.model_info import pools_of, ready, recording_start
from mstar_tp.worker.plan_timer import StepEndPlanTimer
from mstar_tp.worker.start_up import describe, device_name, run_in_thread
from mstar_tp.worker.state import RankState
from mstar_tp.worker.stop_signals import stop_signals
from mstar_tp.worker.vocabulary import read_vocabulary
from mstar_tp.worker.waker import Waker
from mstar_tp.worker.watchdog import Watchdog

__all__ = ["NO_FAULTS", "Rank", "RankFaults", "RankOptions", "run_rank"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 5.0
"""A rank that cannot go on says so after this long, however slow its recording's disk is."""
SWITCH_INTERVAL_S = 1e-4
"""The longest that another thread keeps the interpreter from a step that wants it.

Python's own 5 ms are a whole step of a small model.
"""
SCHEDULE_ADDRESS = "schedule-address"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The place of this rank, from the command line and torchrun's environment."""

    config: ServeConfig
    frontend: str
    instance_id: str
    order_bind: str
    curve: Curve | None
    store: str | None = None
    """A file through which the ranks meet; None: torchrun's own store."""
    faults: RankFaults = NO_FAULTS


class Rank:
    """Owns the sockets and threads of one rank."""

    def __init__(
        self, options: RankOptions, place: RankEnv, meeting: Rendezvous | None, group: str
    ) -> None:
        """``meeting``: where the ranks of ``group`` meet; None: there is one rank.

        No I/O before ``run``.
        """
        self._options = options
        self._place = place
        self._meeting = meeting
        self._group = group
        self._faults = options.faults
        self._context: Context = zmq.Context()
        self._watchdog = Watchdog(place.rank)
        self._link = ConductorLink(
            self._context,
            options.frontend,
            self._hello(),
            options.curve,
            on_lost=self._watchdog.peer_lost,
            tamper=self._faults.frames("reports"),
            arrivals=self._faults.frames("commands"),
        )
        self._groups: JointGroups
        self._device: torch.device
        self._schedule_server: ScheduleServer | None = None
        self._schedule_client: ScheduleClient | None = None
        self._waker = Waker()
        self._landed: SimpleQueue[CopyIn] = SimpleQueue()
        self._recording: FileRecorder | None = None
        self._signals = ExitStack()

    @property
    def rank(self) -> int:
        return self._place.rank

    def run(self) -> None:
        """Serve until the frontend orders a shutdown. Collective on the block while it starts.

        Raises:
            MstarError: why this rank could not start or go on.
        """
        timeout_s = self._options.config.engine.start_timeout_s
        # First of all: from here on this rank notices when the frontend goes, wherever it waits.
        self._link.start(timeout_s)
        try:
            self._faults.at("start")
            self._join()
            self._open_schedule_channel(timeout_s)
            voted(self._groups, self._open_recording)
            self._faults.at("load")
            engine = run_in_thread(self._build)
        except BaseException as error:
            self._report_failed_start(error)
            raise
        try:
            self._serve(engine)
        except BaseException as error:
            self._signals.close()
            if self._recording is not None:
                # Whoever hears of the end may kill this rank at once; what it did last must stand.
                self._recording.flush(FLUSH_TIMEOUT_S)
            self._report_fatal(describe(error), type(error).__name__)
            raise

    def close(self) -> None:
        """Close every socket; what was sent last still leaves."""
        for channel in (self._link, self._schedule_client, self._schedule_server, self._recording):
            if channel is not None:
                channel.close()
        self._waker.close()
        self._context.term()
        self._signals.close()

    # ------------------------------------------------------------------ start

    def _join(self) -> None:
        """Join the group of ranks. Collective."""
        device = torch.device(device_name(self._options.config.engine.device))
        self._groups = self._faults.groups(init_groups(device, self._meeting))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device

    def _build(self) -> Engine:
        return build_engine(
            self._engine_config(),
            self._groups,
            self._device,
            self._copy_landed,
            self._progress,
            self._recorder,
            self._faults.readers,
            lambda: self._faults.at("warm-up"),
        )

    def _engine_config(self) -> EngineConfig:
        """Return the configuration, without adapters once the group has been started again.

        The frontend loads those that are served by then, of which one may be gone or changed by
        now.
        """
        config = self._options.config.engine
        if self._link.epoch == 0 or config.lora is None:
            return config
        return config.model_copy(update={"lora": config.lora.model_copy(update={"adapters": {}})})

    @property
    def _recorder(self) -> Recorder:
        return self._recording or NO_RECORDING

    def _open_recording(self) -> None:
        base = self._options.config.engine.record
        if base is not None:
            self._recording = FileRecorder(recording_path(base, self.rank, self._link.epoch))

    def _start_recording(self, engine: Engine) -> None:
        if self._recording is None:
            return
        self._recording.start(
            recording_start(
                engine,
                rank=self.rank,
                world_size=self._place.world_size,
                epoch=self._link.epoch,
                config_digest=self._options.config.digest(),
                deferred=self._defers,
            )
        )

    def _hello(self) -> Hello:
        return Hello(
            role="rank",
            rank=self._place.rank,
            world_size=self._place.world_size,
            instance_id=self._options.instance_id,
            config_digest=self._options.config.digest(),
            version=VERSION,
            group=self._group,
        )

    def _open_schedule_channel(self, timeout_s: float) -> None:
        """Leader and followers find each other through the group's store, and say hello."""
        if self._place.world_size == 1:
            return
        if self.rank == 0:
            bind = Bind(self._options.order_bind, self._options.curve, option="--order-bind")
            self._schedule_server = ScheduleServer(
                self._context,
                bind,
                self._hello(),
                epoch=self._link.epoch,
                on_lost=self._watchdog.peer_lost,
                tamper=self._faults.frames("schedule"),
            )
            voted(self._groups, self._schedule_server.open)
            publish(SCHEDULE_ADDRESS, self._schedule_server.address)
            server = self._schedule_server
            voted(self._groups, lambda: server.start(timeout_s))
        else:
            voted(self._groups, lambda: None)
            self._schedule_client = ScheduleClient(
                self._context,
                lookup(SCHEDULE_ADDRESS, timeout_s),
                self._hello(),
                self._options.curve,
                on_lost=self._watchdog.peer_lost,
                tamper=self._faults.frames("copies"),
            )
            client = self._schedule_client
            voted(self._groups, lambda: client.start(timeout_s))

    def _progress(self, text: str) -> None:
        self._link.send(Progress(rank=self.rank, text=text))

    def _report_failed_start(self, error: BaseException) -> None:
        if not isinstance(error, OtherRankFailedError):
            self._link.send(StartFailed(rank=self.rank, cause=describe(error)))

    def _copy_landed(self, report: CopyIn) -> None:
        """A copy of this rank is in or failed: tell the leader.

        Any thread, also before its loop runs.
        """
        if self._schedule_client is not None:
            self._recorder.put(report)
            self._schedule_client.send(report)
        else:
            self._landed.put(report)
            self._waker.wake()

    # ------------------------------------------------------------------ serve

    def _serve(self, engine: Engine) -> None:
        self._start_recording(engine)
        fence = AdmitFence()
        runner = self._build_runner(engine)
        steps = StepThread(
            self._at_its_points(runner.run_step),
            fence,
            self._waker.wake,
            runner.prepare_thread,
            self._wake_at(),
            runner,
        )
        state = RankState(
            self.rank,
            engine.requests,
            engine.kv,
            engine.lora,
            self._link.send,
            self._recorder,
        )
        if self.rank == 0:
            loop: Leader | Follower = self._build_leader(engine, state, steps, runner, fence)
        else:
            assert self._schedule_client is not None
            loop = Follower(
                state, steps, runner, fence, self._link, self._schedule_client, self._waker
            )
        steps.start()
        self._watchdog.watch_steps(
            steps.running_for_s, self._options.config.engine.step_timeout_s, self._report_fatal
        )
        if self._options.store is None:  # torchrun started it, and passes signals on
            self._signals.enter_context(stop_signals(self._report_leaving))
        self._faults.at("ready")
        self._link.send(ready(engine, self.rank))
        loop.run()
        self._watchdog.disarm()
        self._faults.at("shutdown")
        if not steps.stop(STOP_TIMEOUT_S):
            raise PeerLostError(
                f"rank {self.rank}: its last step did not end in {STOP_TIMEOUT_S} s"
            )
        engine.close()

    def _report_leaving(self, number: signal.Signals) -> None:
        logger.info("%s: this rank serves on until the frontend tells it to stop", number.name)
        self._link.send(Leaving(rank=self.rank))

    def _build_runner(self, engine: Engine) -> StepRunner:
        build: Callable[..., StepRunner] = StepRunner
        if self._defers:
            build = partial(DeferredRunner, inputs=engine.inputs)
        return build(
            engine.model,
            engine.requests,
            engine.kv,
            engine.lora,
            self._groups,
            self._options.config.engine.logprobs_mode,
            self._recorder,
            engine.graphs,
        )

    @property
    def _defers(self) -> bool:
        """Return whether tokens stay on the device: launching a step costs less than its run."""
        return self._overlaps and self._device.type == "cuda"

    def _report_fatal(self, cause: str, error: str = "HungStep") -> None:
        self._link.send(Fatal(rank=self.rank, cause=cause, error=error))

    def _at_its_points(self, run: RunStep) -> RunStep:
        """``run``, which comes to the points of a step where a test may make it fail."""
        faults = self._faults

        def run_step(entry: Step, settled: Callable[[], None]) -> Sequence[StepResult]:
            faults.at("step")

            def settle() -> None:
                settled()
                faults.at("forward")

            result = run(entry, settle)
            faults.at("committed")
            return result

        return run if faults is NO_FAULTS else run_step

    def _wake_at(self) -> WakeAt:
        if self.rank != 0:
            return WakeAt.ERROR
        return WakeAt.LAUNCH if self._overlaps else WakeAt.RESULT

    @property
    def _overlaps(self) -> bool:
        wanted = self._options.config.engine.async_scheduling
        if wanted is not None:
            return wanted
        # The threads of a lone CPU rank share one interpreter with nothing to wait for between
        # steps: what the main thread does beside a forward costs the forward as much.
        return self._place.world_size > 1 or self._device.type == "cuda"

    def _build_leader(
        self,
        engine: Engine,
        state: RankState,
        steps: StepThread,
        runner: StepRunner,
        fence: AdmitFence,
    ) -> Leader:
        config = self._options.config.engine
        scheduler = Scheduler(
            engine.requests,
            engine.kv,
            pools_of(engine),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.step_tokens(self._device.type),
            fair_queue=fair_queue_of(config, engine.requests, engine.lora),
        )
        return Leader(
            state,
            scheduler,
            steps,
            runner,
            fence,
            self._link,
            self._schedule_server,
            self._waker,
            self._landed,
            plan_timer=StepEndPlanTimer() if self._overlaps else None,
            grammars=Grammars(
                lambda: read_vocabulary(config.model, engine.model_config), self._waker.wake
            ),
        )


def run_rank(options: RankOptions) -> None:
    """Join the group that torchrun's environment names and serve until an ordered shutdown.

    Raises:
        MstarError: why this rank could not start or go on.
    """
    config = options.config.engine
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    place = rank_env()
    if place.world_size != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} and torchrun started "
            f"{place.world_size} ranks: make them equal"
        )
    meeting = _meeting(options.store, place)
    rank = Rank(options, place, meeting, group_name(meeting, config.start_timeout_s))
    try:
        rank.run()
    finally:
        rank.close()
    destroy_groups()


def _meeting(store: str | None, place: RankEnv) -> Rendezvous | None:
    if place.world_size == 1:
        return None
    return env_rendezvous(place) if store is None else file_rendezvous(store, place)
