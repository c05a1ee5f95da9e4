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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from mstar_tp.engine.resources.lora.reads import Read, Readers
from mstar_tp.errors import ConfigError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.wire.messages import AdapterKey

logger = logging.getLogger(__name__)

F = TypeVar("F", bound="Fault")

LOOK_AGAIN_S = 0.02


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One thing that goes wrong while it stands in the file. None means every rank, adapter."""

    rank: int | None = None
    adapter: str | None = None

    def hits(self, rank: int, adapter: str) -> bool:
        return self.rank in (None, rank) and self.adapter in (None, adapter)


class SlowRead(Fault, frozen=True, kw_only=True):
    """A read ends ``seconds`` late, or once the fault is gone from the file, if that is sooner: a
    slow or stuck storage. What was read stays in memory meanwhile.
    """

    seconds: float


class FailRead(Fault, frozen=True, kw_only=True):
    """A read fails with an OSError that says ``cause``."""

    cause: str = "input/output error"


class WrongBytes(Fault, frozen=True, kw_only=True):
    """A read yields other weights, and so another digest, than the file holds."""


AnyFault = SlowRead | FailRead | WrongBytes


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

    def hitting(self, kind: type[F], rank: int, adapter: str) -> F | None:
        """The first fault of ``kind`` in force for this rank and adapter."""
        for fault in self.current():
            if isinstance(fault, kind) and fault.hits(rank, adapter):
                return fault
        return None

    def wrap(self, rank: int) -> Callable[[Readers], Readers]:
        """What makes a rank's readers come to the fault points of a read."""
        return lambda readers: FaultyReaders(readers, self, rank)


def write_faults(path: str | Path, faults: Sequence[AnyFault]) -> None:
    """Make ``path`` hold ``faults``; a reader sees the old ones or these, nothing between."""
    path = Path(path)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(msgspec.json.encode(list(faults)))
    os.replace(fresh, path)


class FaultyReaders:
    """Readers whose reads meet the faults in force. Header checks are left alone."""

    def __init__(self, readers: Readers, faults: FaultFile, rank: int) -> None:
        self._readers = readers
        self._faults = faults
        self._rank = rank

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        self._readers.start(read, lambda: self._read(read, work))

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        self._readers.call(key, work, late)

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
    """Make it what the same read would have given of a file with every B negated. In place, before
    anybody else has it: a second copy would be memory that nobody counts.
    """
    for tensor in adapter.b.values():
        tensor.neg_()
    digest = hashlib.sha256(f"other than {adapter.digest}".encode()).hexdigest()[:32]
    object.__setattr__(adapter, "digest", digest)
