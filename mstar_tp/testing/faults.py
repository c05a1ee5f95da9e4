"""Faults at will: what a test or a chaos run makes go wrong in a server that serves otherwise.

The faults in force stand in one JSON file, which the ranks look at whenever they come to a fault
point; whoever runs the test replaces the file while they serve. Only a server in test mode takes
such a file (``env.faults_file``), and without one nothing here is even imported.

A kind of fault is one class below and the one place that asks for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from mstar_tp.common.errors import ConfigError
from mstar_tp.distributed.comm import AgreeOp, CommGroup, JointGroups
from mstar_tp.engine.resources.lora.cpu_cache.reads import Read, Readers
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.wire.codec import Tamper
from mstar_tp.wire.values import AdapterKey
from mstar_tp.worker.fault_points import Point, Stream

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

F = TypeVar("F", bound="Fault")

LOOK_AGAIN_S = 0.02


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One thing that goes wrong while it stands in the file.

    None means every rank, adapter and epoch (how often the group was started again).
    """

    rank: int | None = None
    adapter: str | None = None
    epoch: int | None = None

    def hits(self, rank: int, adapter: str | None = None, epoch: int | None = None) -> bool:
        """None of the thing asked about: it has none."""
        wanted = ((self.rank, rank), (self.adapter, adapter), (self.epoch, epoch))
        return all(mine is None or got is None or mine == got for mine, got in wanted)


class SlowRead(Fault, frozen=True, kw_only=True):
    """A slow or stuck storage: a read ends late.

    It ends ``seconds`` late, or once the fault is gone from the file, if that is sooner. The bytes
    read stay in memory meanwhile.
    """

    seconds: float


class FailRead(Fault, frozen=True, kw_only=True):
    """A read fails with an OSError that says ``cause``."""

    cause: str = "input/output error"


class WrongBytes(Fault, frozen=True, kw_only=True):
    """A read yields other weights, and so another digest, than the file holds."""


class Crash(Fault, frozen=True, kw_only=True):
    """The rank is killed (``hangs``: stopped, as by SIGSTOP) when it next comes to ``point``."""

    point: Point
    hangs: bool = False


class StuckCollective(Fault, frozen=True, kw_only=True):
    """The rank enters no collective while the fault stands, so its peers wait in theirs."""


class BadFrame(Fault, frozen=True, kw_only=True):
    """A bad frame on the rank's ``stream``: lost, doubled, or overtaken by the one behind it.

    It is the next frame, or the next that carries the message whose class ``of`` names.
    """

    stream: Stream = "schedule"
    what: Literal["dropped", "doubled", "late"]
    of: str | None = None


AnyFault = SlowRead | FailRead | WrongBytes | Crash | StuckCollective | BadFrame


class FaultFile:
    """The faults in force, as the file says now. Any thread."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError: the file cannot be read, or holds no list of faults."""
        self.path = Path(path)
        self.current()

    def current(self) -> tuple[AnyFault, ...]:
        """Every fault in force.

        Raises:
            ConfigError: the file cannot be read, or holds no list of faults.
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=tuple[AnyFault, ...])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"MSTAR_TP_FAULTS: {self.path} cannot be read as faults: {error}"
            ) from None

    def write(self, faults: Sequence[AnyFault]) -> None:
        """Put ``faults`` in force instead, all at once. For whoever runs the test."""
        write_faults(self.path, faults)

    def hitting(
        self, kind: type[F], rank: int, adapter: str | None = None, epoch: int | None = None
    ) -> F | None:
        """The first fault of ``kind`` in force for this rank, adapter and epoch."""
        for fault in self.current():
            if isinstance(fault, kind) and fault.hits(rank, adapter, epoch):
                return fault
        return None

    def wrap(self, rank: int) -> Callable[[Readers], Readers]:
        """A wrapper that makes a rank's readers come to the fault points of a read."""
        return lambda readers: FaultyReaders(readers, self, rank)


class FaultyRank:
    """The faults that a rank under test works with (``worker.faults.RankFaults``)."""

    def __init__(self, faults: FaultFile, rank: int, epoch: int) -> None:
        self._faults = faults
        self._rank = rank
        self._epoch = epoch

    def at(self, point: Point) -> None:
        """Crash or hang here, if the file says so."""
        for fault in self._faults.current():
            if isinstance(fault, Crash) and fault.point == point:
                if fault.hits(self._rank, epoch=self._epoch):
                    os.kill(os.getpid(), signal.SIGSTOP if fault.hangs else signal.SIGKILL)

    def readers(self, readers: Readers) -> Readers:
        return FaultyReaders(readers, self._faults, self._rank, lambda: self.at("check"))

    def groups(self, groups: JointGroups) -> JointGroups:
        return JointGroups(FaultyGroup(groups.tp, self._is_stuck))

    def frames(self, stream: Stream) -> Tamper:
        """The frames that each frame on ``stream`` becomes."""
        done = False
        held: list[bytes] = []

        def tamper(data: bytes) -> Sequence[bytes]:
            nonlocal done
            frames = [data, *held]
            held.clear()
            fault = self._faults.hitting(BadFrame, self._rank, epoch=self._epoch)
            if fault is None or fault.stream != stream or done:
                return frames
            if fault.of is not None and fault.of.encode() not in data:
                return frames
            done = True
            if fault.what == "doubled":
                return [data, data]
            if fault.what == "late":
                held.append(data)
            return []

        return tamper

    def _is_stuck(self) -> bool:
        return self._faults.hitting(StuckCollective, self._rank, epoch=self._epoch) is not None


class FaultyGroup:
    """A group whose collectives wait, before they are entered, while ``stuck`` says so."""

    def __init__(self, group: CommGroup, stuck: Callable[[], bool]) -> None:
        self._group = group
        self._stuck = stuck
        self.rank = group.rank
        self.world_size = group.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._wait()
        return self._group.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self._wait()
        return self._group.all_gather(x, dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        self._wait()
        return self._group.gather(x, dim)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._wait()
        return self._group.broadcast(x)

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        self._wait()
        return self._group.agree(values, op)

    def _wait(self) -> None:
        while self._stuck():
            time.sleep(LOOK_AGAIN_S)


def write_faults(path: str | Path, faults: Sequence[AnyFault]) -> None:
    """Make ``path`` hold ``faults``; a reader sees the old ones or these, nothing between."""
    path = Path(path)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(msgspec.json.encode(list(faults)))
    os.replace(fresh, path)


class FaultyReaders:
    """Readers whose reads meet the faults in force."""

    def __init__(
        self,
        readers: Readers,
        faults: FaultFile,
        rank: int,
        at_check: Callable[[], None] = lambda: None,
    ) -> None:
        """``at_check`` is called before each header check."""
        self._readers = readers
        self._faults = faults
        self._rank = rank
        self._at_check = at_check

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        self._readers.start(read, lambda: self._read(read, work))

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        def checked() -> None:
            self._at_check()
            work()

        self._readers.call(key, checked, late)

    def close(self) -> None:
        self._readers.close()

    def _read(self, read: Read, work: Callable[[], LoadedAdapter]) -> LoadedAdapter:
        rank, name = self._rank, read.key.name
        failing = self._faults.hitting(FailRead, rank, name)
        adapter = work() if failing is None else None
        slow = self._faults.hitting(SlowRead, rank, name)
        if slow is not None:
            self._wait(slow)
        if failing is not None:
            raise OSError(failing.cause)
        assert adapter is not None
        if self._faults.hitting(WrongBytes, rank, name) is not None:
            _spoil(adapter)
        return adapter

    def _wait(self, slow: SlowRead) -> None:
        end = time.monotonic() + slow.seconds
        while slow in self._faults.current() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_AGAIN_S))


def _spoil(adapter: LoadedAdapter) -> None:
    """Make the shard what the same read would have given of a file with every B negated.

    It is changed in place, before anybody else has it: a second copy would be memory that nobody
    counts.
    """
    for tensor in adapter.b.values():
        tensor.neg_()
    digest = hashlib.sha256(f"other than {adapter.digest}".encode()).hexdigest()[:32]
    object.__setattr__(adapter, "digest", digest)
