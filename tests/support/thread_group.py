"""Threads as ranks: a group whose collectives meet in this process.

For tests and for users who try a model out in one process. Sums run in rank order, so they are
bit-equal on every run. Where the real thing would hang (a rank that left, ranks in different
collectives) this raises on every rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch

from mstar_tp.common.errors import LockstepError, PeerLostError
from mstar_tp.distributed.comm import AgreeOp, JointGroups

Result = TypeVar("Result")

WAIT_S = 60.0


@contextmanager
def dispatch_flags_restored() -> Iterator[None]:
    """Give torch's module-level flags about dispatch modes back as they were.

    Each mode notes the flags when it is entered and puts them back when it is left. Modes that are
    entered on one thread and left on another's watch leave them set for the whole process, and
    torch.compile then takes every later call for one inside a mode.
    """
    flags = {
        name: value
        for name, value in vars(_python_dispatch).items()
        if name.startswith("_is_in_") and isinstance(value, bool)
    }
    try:
        yield
    finally:
        for name, value in flags.items():
            setattr(_python_dispatch, name, value)
        tell_guards = getattr(
            _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None
        )
        if tell_guards is not None:
            tell_guards(flags.get("_is_in_any_mode_without_ignore_compile_internals", False))


class _Round:
    """One collective: what each rank came with, and how many are still to come."""

    def __init__(self, world_size: int) -> None:
        self.entered: list[tuple[str, Any]] = [("", None)] * world_size
        self.missing = world_size


class ThreadGroups:
    """The groups of ``world_size`` thread-ranks: ``groups[rank]`` is each one's CommGroup."""

    def __init__(self, world_size: int, wait_s: float = WAIT_S) -> None:
        self.world_size = world_size
        self._wait_s = wait_s
        self._meeting = threading.Condition()  # guards _round and _broken
        self._round = _Round(world_size)
        self._broken = False
        self.calls: Counter[str] = Counter()
        """How often rank 0 entered each collective. Rank 0's thread alone."""
        self._groups = [ThreadGroup(self, rank) for rank in range(world_size)]

    def __getitem__(self, rank: int) -> ThreadGroup:
        return self._groups[rank]

    def abort(self) -> None:
        """Make every rank that waits, or will, raise PeerLostError."""
        with self._meeting:
            self._broken = True
            self._meeting.notify_all()

    def run(self, rank_main: Callable[[ThreadGroup], Result]) -> list[Result]:
        """``rank_main`` on a thread a rank; their results in rank order.

        Raises:
            BaseException: the first error of a rank; the others are freed, none is left running.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def main(group: ThreadGroup) -> None:
            try:
                results[group.rank] = rank_main(group)
            except BaseException as error:
                errors.append(error)
                self.abort()

        threads = [
            threading.Thread(target=main, args=(group,), name=f"rank-{group.rank}", daemon=True)
            for group in self._groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # A rank that was only freed by another's failure says less than that failure.
            raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
        return [results[rank] for rank in range(self.world_size)]

    def exchange(self, rank: int, call: str, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order; all ranks must make the same ``call``.

        Raises:
            LockstepError: they did not; on every rank.
            PeerLostError: a rank never came.
        """
        if rank == 0:
            self.calls[call.partition("(")[0]] += 1
        entered = self._enter(rank, call, value)
        for other, (name, _) in enumerate(entered):
            if name != entered[0][0]:
                raise LockstepError(
                    f"rank 0 entered {entered[0][0]} while rank {other} entered {name}"
                )
        return [each for _, each in entered]

    def _enter(self, rank: int, call: str, value: Any) -> list[tuple[str, Any]]:
        """The inputs of each rank, once all have come; a round that is full stays so."""
        with self._meeting:
            this = self._round
            this.entered[rank] = (call, value)
            this.missing -= 1
            if this.missing == 0 and not self._broken:
                self._round = _Round(self.world_size)
                self._meeting.notify_all()
                return this.entered
            self._meeting.wait_for(lambda: self._round is not this or self._broken, self._wait_s)
            if self._round is not this:
                return this.entered
            self._broken = True
            self._meeting.notify_all()
        raise PeerLostError(f"rank {rank} waited in {call} for a rank that failed or never came")


class ThreadGroup:
    """One thread-rank's CommGroup. Tensors on any device that all threads share."""

    def __init__(self, groups: ThreadGroups, rank: int) -> None:
        self._groups = groups
        self.rank = rank
        self.world_size = groups.world_size

    @property
    def joint(self) -> JointGroups:
        """This rank's JointGroups over the one group."""
        return JointGroups(self)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._tensors("all_reduce", x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._tensors("all_gather", x, f", dim={dim}"), dim=dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        parts = self._tensors("gather", x, f", dim={dim}")
        return torch.cat(parts, dim=dim) if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._tensors("broadcast", x)[0])

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        call = f"agree({len(values)} values, {op.value})"
        votes = self._groups.exchange(self.rank, call, list(values))
        choose = min if op is AgreeOp.MIN else max
        return [choose(column) for column in zip(*votes, strict=True)]

    def _tensors(self, name: str, x: torch.Tensor, rest: str = "") -> list[torch.Tensor]:
        call = f"{name}({list(x.shape)} {x.dtype}{rest})"
        # A copy: the caller may write its tensor while a slower rank still reads this one.
        tensors: list[torch.Tensor] = self._groups.exchange(self.rank, call, x.detach().clone())
        return tensors
