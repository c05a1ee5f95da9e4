"""The collectives of ``collectives.cpp`` over a piece of memory that all ranks of a group map.

One thread a rank at a time. The interpreter is free while a rank waits for others. Where the memory
comes from, and who may use it, is ``distributed.shared_memory``'s business.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch

from mstar_tp.common.errors import LockstepError, PeerLostError

MAX_RANKS = 64
_CONTROL_BYTES = 384
"""One rank's size at the front of the memory, for its round and the call that it is in."""
_PAGE = 4096

SUMMED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""The dtypes that can be summed, by number in C++; the narrow floats are summed in float32."""
MOVED = (*SUMMED, torch.bool)
NUMBER = {dtype: number for number, dtype in enumerate(MOVED)}
"""A dtype as C++ knows it."""


class Op(IntEnum):
    SUM = 0
    MIN = 1
    MAX = 2
    ALL_GATHER = 3
    GATHER = 4
    BROADCAST = 5


class _Outcome(IntEnum):
    DONE = 0
    LOST = 1
    MISMATCH = 2
    LATE = 3


class _Call(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("numel", ctypes.c_int64),
        ("number", ctypes.c_int64),
    )

    def __str__(self) -> str:
        name, dtype = Op(self.op).name.lower(), str(MOVED[self.dtype]).removeprefix("torch.")
        return f"{name} of {self.numel} {dtype} as call {self.number}"


class _Comm(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("peers", ctypes.POINTER(ctypes.c_int32)),
        ("slots_at", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("yield_ns", ctypes.c_int64),
        ("timeout_ms", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("round", ctypes.c_uint32),
        ("culprit", ctypes.c_int32),
        ("calls", ctypes.c_int64),
        ("theirs", _Call),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The waits of a rank for another: it spins, then lets others run, then sleeps."""

    spin_us: int
    yield_us: int
    timeout: timedelta
    """After this long with all peers alive the wait is an error."""


def memory_bytes(world_size: int, slot_bytes: int) -> int:
    """Size of the memory of a group whose ranks hand over ``slot_bytes`` (of whole pages) at once.

    It must be all zeros before the first rank uses it.
    """
    assert slot_bytes % _PAGE == 0
    return _slots_at(world_size) + 2 * world_size * slot_bytes


def _slots_at(world_size: int) -> int:
    return -(-world_size * _CONTROL_BYTES // _PAGE) * _PAGE


class Collectives:
    """One rank's end. Tensors are dense and in this machine's memory.

    Every method is a collective: each rank calls it, in the same order. All raise PeerLostError
    when a rank's process has ended or left, and LockstepError when ranks are in different calls;
    after either the group is of no more use, and each later call raises the same.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: ctypes.Array[ctypes.c_char],
        slot_bytes: int,
        rank: int,
        peers: Sequence[int],
        patience: Patience,
    ) -> None:
        """``peers``: a process descriptor of each rank, -1 for its own; closed by ``leave``."""
        world_size = len(peers)
        assert len(memory) >= memory_bytes(world_size, slot_bytes) and world_size <= MAX_RANKS
        self._memory = memory  # mapped for as long as this lives
        self._peers = (ctypes.c_int32 * world_size)(*peers)
        self._comm = _Comm(
            memory=ctypes.addressof(memory),
            peers=self._peers,
            slots_at=_slots_at(world_size),
            slot_bytes=slot_bytes,
            spin_ns=1000 * patience.spin_us,
            yield_ns=1000 * patience.yield_us,
            timeout_ms=patience.timeout // timedelta(milliseconds=1),
            rank=rank,
            world=world_size,
        )
        self._ref = ctypes.byref(self._comm)
        self._broken: str | None = None
        self._lost = False
        self._call = library.collective
        self._call.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
        ]
        self._leave = library.leave_collectives
        self._leave.argtypes, self._leave.restype = [ctypes.c_void_p], None

    def reduce(self, x: torch.Tensor, op: Op) -> None:
        """``x`` = all ranks' folded by ``op``, in rank order. Minima and maxima are of int64.

        Raises:
            ValueError: no such reduction of this dtype; before any rank meets another.
        """
        wanted = SUMMED if op is Op.SUM else (torch.int64,)
        if x.dtype not in wanted:
            raise ValueError(f"{op.name.lower()} over ranks takes no {x.dtype}: cast it first")
        self._run(op, x, 0, x.data_ptr())

    def gather(self, x: torch.Tensor, dim: int, everywhere: bool) -> torch.Tensor | None:
        """Every rank's ``x`` along ``dim``, in rank order: on rank 0, or ``everywhere``."""
        dim %= x.dim()
        shape = list(x.shape)
        shape[dim] *= self._comm.world
        takes = everywhere or self._comm.rank == 0
        out = torch.empty(shape, dtype=x.dtype) if takes else None
        row = x.element_size()
        for size in x.shape[dim:]:
            row *= size
        op = Op.ALL_GATHER if everywhere else Op.GATHER
        self._run(op, x, row, 0 if out is None else out.data_ptr())
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's ``x`` into every rank's."""
        self._run(Op.BROADCAST, x, 0, x.data_ptr())

    @property
    def address(self) -> int:
        """The address of what C++ calls collectives with, for ``run``."""
        return ctypes.addressof(self._comm)

    def run(self, calls: Callable[[], int], what: str) -> None:
        """Let C++ make ``calls`` on this group, as often as every other rank does.

        It answers the first outcome that is not 0, or 0. ``what`` says in errors what they are for.
        """
        if self._broken is not None:
            raise PeerLostError(self._broken)
        outcome = calls()
        if outcome != _Outcome.DONE:
            self._fail(_Outcome(outcome), f"call {self._comm.calls}, in {what}")

    def leave(self) -> None:
        """Make no more calls: whoever still waits for this rank is told so. Idempotent."""
        if not self._lost:
            self._lost = True
            self._broken = self._broken or "this rank has left its group"
            self._leave(self._ref)
            for peer in self._peers:
                if peer >= 0:
                    os.close(peer)

    def _run(self, op: Op, x: torch.Tensor, row: int, out: int) -> None:
        if x.device.type != "cpu" or not x.is_contiguous() or x.dtype not in NUMBER:
            raise ValueError(
                f"shared memory takes dense CPU tensors of plain numbers, not {x.dtype} on "
                f"{x.device} with strides {x.stride()}"
            )
        if self._broken is not None:
            raise PeerLostError(self._broken)
        dtype, size = NUMBER[x.dtype], x.element_size()
        outcome = self._call(self._ref, op, dtype, x.numel(), size, row, x.data_ptr(), out)
        if outcome != _Outcome.DONE:
            self._fail(_Outcome(outcome), _Call(op, dtype, x.numel(), self._comm.calls))

    def _fail(self, outcome: _Outcome, call: _Call | str) -> None:
        rank, culprit = self._comm.rank, self._comm.culprit
        if outcome is _Outcome.MISMATCH:
            self._broken = (
                f"rank {rank} is in {call} while rank {culprit} is in {self._comm.theirs}: "
                "ranks have lost step"
            )
            raise LockstepError(self._broken)
        if outcome is _Outcome.LOST:
            self._broken = f"rank {culprit} has ended, and rank {rank} waits for it in {call}"
        else:
            waited_s = self._comm.timeout_ms / 1000
            self._broken = f"rank {culprit} did not come to {call} of rank {rank} in {waited_s:g} s"
        raise PeerLostError(self._broken)
