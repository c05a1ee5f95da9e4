"""Collectives over shared memory, for CPU ranks of one machine.

Rank 0 makes the memory, the others map it through /proc. It has no name in any folder: it goes with
the last process that maps it, however that one ends, and no group can meet another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from mstar_tp.common import env
from mstar_tp.distributed.comm import AgreeOp, CommGroup
from mstar_tp.kernels.build import load_library
from mstar_tp.kernels.collectives import MAX_RANKS, Collectives, Op, Patience, memory_bytes

logger = logging.getLogger(__name__)

SLOT_BYTES = 256 << 10
"""The bytes that a rank hands over at once; the memory has twice that for each rank."""


class Board(Protocol):
    """The store on which ranks of a group write facts for each other: torch's Store."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """The facts that a rank tells the others before any of them maps anything."""

    problem: str = ""
    """Why it cannot share memory."""
    machine: str = ""
    pid: int = 0
    token: str = ""
    """The last bytes that the memory must have; rank 0's."""
    descriptor: int = -1
    """Rank 0's of the memory."""


class _UnsharedError(Exception):
    """This rank cannot share memory with the others; the text says why."""


class SharedMemoryGroup:
    """A CommGroup whose collectives go through memory that its ranks share.

    Sums are taken in rank order, bfloat16 and float16 in float32 and rounded once. Strided tensors
    go through a dense copy. Each collective raises PeerLostError when a rank's process has ended,
    LockstepError when ranks are in different calls, ValueError for a tensor that is not in this
    machine's memory.
    """

    def __init__(self, rank: int, world_size: int, collectives: Collectives) -> None:
        self.rank = rank
        self.world_size = world_size
        self.collectives = collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.contiguous()
        self.collectives.reduce(dense, Op.SUM)
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gathered = self.collectives.gather(x.contiguous(), dim, everywhere=True)
        assert gathered is not None
        return gathered

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        return self.collectives.gather(x.contiguous(), dim, everywhere=False)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.contiguous()
        self.collectives.broadcast(dense)
        return x if dense is x else x.copy_(dense)

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        votes = torch.tensor(list(values), dtype=torch.int64)
        self.collectives.reduce(votes, Op.MIN if op is AgreeOp.MIN else Op.MAX)
        return votes.tolist()

    def close(self) -> None:
        """Leave: a rank that still waits for this one gets PeerLostError. Idempotent."""
        self.collectives.leave()


def share_memory(
    group: CommGroup, board: Board, patience: Patience, slot_bytes: int = SLOT_BYTES
) -> SharedMemoryGroup | None:
    """Return ``group``'s ranks in a group over shared memory.

    It is None, with a logged reason, where they cannot share any. Collective on ``group``: all
    ranks get one, or none does.

    ``board`` is new to this group. Memory is taken here, so it cannot run out later.
    """
    with contextlib.ExitStack() as stack:
        card = _own_card(group, slot_bytes, stack)
        board.set(f"card/{group.rank}", json.dumps(asdict(card)))
        group.agree([0])  # every card is there
        cards = [_Card(**json.loads(board.get(f"card/{r}"))) for r in range(group.world_size)]
        shared, problem = None, _first_problem(cards)
        if not problem:
            shared, mine = _tried(lambda: _attach(group.rank, cards, patience, slot_bytes))
            board.set(f"attached/{group.rank}", mine)
            group.agree([0])  # every word is there, and nobody needs rank 0's descriptor any more
            said = [board.get(f"attached/{r}").decode() for r in range(group.world_size)]
            problem = next((text for text in said if text), "")
    if problem:
        if group.rank == 0:
            logger.info("collectives of these ranks go over gloo: %s", problem)
        if shared is not None:
            shared.close()
        return None
    return shared


def _tried(work: Callable[[], SharedMemoryGroup]) -> tuple[SharedMemoryGroup | None, str]:
    try:
        return work(), ""
    except _UnsharedError as error:
        return None, str(error)


def _own_card(group: CommGroup, slot_bytes: int, stack: contextlib.ExitStack) -> _Card:
    """Rank 0's memory is made here; its descriptor closes with ``stack``."""
    try:
        machine = _usable(group)
        if group.rank != 0:
            return _Card(machine=machine, pid=os.getpid())
        token = secrets.token_hex(16)
        try:
            fd = _new_memory(memory_bytes(group.world_size, slot_bytes), token)
        except (OSError, AttributeError) as error:  # no memfd on this system, or no memory
            raise _UnsharedError(f"no shared memory: {error}") from None
        stack.callback(os.close, fd)
        return _Card(machine=machine, pid=os.getpid(), token=token, descriptor=fd)
    except _UnsharedError as error:
        return _Card(problem=f"rank {group.rank}: {error}")


def _usable(group: CommGroup) -> str:
    """This machine, as no other calls itself: a boot of it, and the processes it sees."""
    if not env.wants_shared_memory():
        raise _UnsharedError("MSTAR_TP_SHARED_MEMORY is 0")
    if group.world_size > MAX_RANKS:
        raise _UnsharedError(f"more than {MAX_RANKS} ranks")
    if load_library() is None:
        raise _UnsharedError("CPU kernels are off, or could not be compiled")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise _UnsharedError(f"no /proc: {error}") from None


def _first_problem(cards: Sequence[_Card]) -> str:
    """The same on every rank; empty when there is none."""
    for rank, card in enumerate(cards):
        if card.problem:
            return card.problem
        if card.machine != cards[0].machine:
            return f"rank {rank} is on another machine, or in another container, than rank 0"
    return ""


def _new_memory(size: int, token: str) -> int:
    """A descriptor of ``size`` bytes of memory, all of them there, with ``token`` behind them."""
    fd = os.memfd_create("mstar-tp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size + len(token))
        os.pwrite(fd, token.encode(), size)
        # Nobody can make it smaller: touching what is gone would kill a rank.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _attach(
    rank: int, cards: Sequence[_Card], patience: Patience, slot_bytes: int
) -> SharedMemoryGroup:
    """Raises _UnsharedError: this rank cannot reach the memory or its peers."""
    library = load_library()
    assert library is not None
    peers: list[int] = []
    try:
        memory = _map(cards[0], memory_bytes(len(cards), slot_bytes))
        for peer, card in enumerate(cards):
            peers.append(-1 if peer == rank else os.pidfd_open(card.pid))
    except (OSError, ValueError) as error:
        for fd in peers:
            if fd >= 0:
                os.close(fd)
        raise _UnsharedError(f"rank {rank}: cannot share memory with the others: {error}") from None
    collectives = Collectives(library, memory, slot_bytes, rank, peers, patience)
    return SharedMemoryGroup(rank, len(cards), collectives)


def _map(card: _Card, size: int) -> ctypes.Array[ctypes.c_char]:
    """Raises OSError or ValueError: it is not there, or is not the memory that ``card`` means."""
    # Whatever the number means by now, opening it must neither wait nor do anything.
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(f"/proc/{card.pid}/fd/{card.descriptor}", flags)
    try:
        token = card.token.encode()
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, len(token), size) != token:
            raise ValueError("rank 0's memory is not where it should be")
        # The array keeps the map, and the map the memory.
        return (ctypes.c_char * size).from_buffer(mmap.mmap(fd, size))
    finally:
        os.close(fd)
