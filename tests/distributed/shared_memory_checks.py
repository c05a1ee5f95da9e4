"""Ranks of the shared-memory tests: processes forked from one that has imported torch.

Started by test_shared_memory, which reads the names of the checks that passed; an error is the
failure. Ranks meet in a file; only the check of the default start uses gloo.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from comm_checks import check_group

from mstar_tp.common.errors import LockstepError, PeerLostError
from mstar_tp.distributed import shared_memory, start
from mstar_tp.distributed.comm import AgreeOp, TorchGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup, share_memory
from mstar_tp.kernels.collectives import MOVED, SUMMED, Patience

SLOT = 4096
PATIENCE = Patience(spin_us=20, yield_us=50, timeout=timedelta(minutes=5))
CALLS = 250


class Board:
    """Ranks that agree on nothing but being there, through a file."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = dist.FileStore(str(path), world_size)
        self._groups = 0

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        self._groups += 1
        here = dist.PrefixStore(f"agree-{self._groups}", self._store)
        if here.add("count", 1) == self.world_size:
            here.set("all", "1")
        here.wait(["all"])
        return list(values)

    def try_group(self, patience: Patience = PATIENCE) -> SharedMemoryGroup | None:
        self._groups += 1
        board = dist.PrefixStore(f"group-{self._groups}", self._store)
        return share_memory(self, board, patience, SLOT)  # type: ignore[arg-type]

    def group(self) -> SharedMemoryGroup:
        group = self.try_group()
        assert group is not None
        return group


# ------------------------------------------------------------------------ against torch, bit by bit


def given(rank: int, seed: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """What ``rank`` brings to a call: any values, some of them special."""
    random_ = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=random_).bool()
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(low, high, tuple(shape), generator=random_, dtype=torch.int64).to(
            dtype
        )
    scale = 10.0 ** torch.randint(-9, 4, tuple(shape), generator=random_)
    x = (torch.randn(tuple(shape), generator=random_, dtype=torch.float64) * scale).to(dtype)
    flat = x.view(-1)
    for at, value in enumerate((float("inf"), -0.0, float("nan"))):
        if seed % 3 == 0 and len(flat) > 9:
            flat[3 * at + rank % 2] = value
    return x


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order, the narrow floats in float32 and rounded once."""
    narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    both_nan = got.isnan() & wanted.isnan()
    return bool((both_nan | (got.view(word) == wanted.view(word))).all())


def check_sums(board: Board) -> None:
    group, world_size = board.group(), board.world_size
    seed = 0
    for dtype in SUMMED:
        a_slot = SLOT // dtype.itemsize
        for numel in (0, 1, 31, 512, 513, a_slot - 1, a_slot, a_slot + 1, 3 * a_slot + 7, 40_001):
            seed += 1
            parts = [given(rank, seed, dtype, [numel]) for rank in range(world_size)]
            x = parts[group.rank].clone()
            assert group.all_reduce(x) is x
            assert same_bits(x, summed(parts)), f"{dtype}, {numel} elements"
    # Every float16 there is, widened and narrowed again: adding -0 changes none.
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    x = every.clone() if group.rank == 0 else torch.full_like(every, -0.0)
    assert same_bits(group.all_reduce(x), every)
    try:
        group.all_reduce(torch.ones(3, dtype=torch.bool))
        raise AssertionError("a sum of truths was taken")
    except ValueError as error:
        assert "cast it first" in str(error)
    group.close()


def check_shares(board: Board) -> None:
    """Sums whose ranks each add a share, at the size of slot that serves."""
    patience, self_slot = PATIENCE, shared_memory.SLOT_BYTES
    board._groups += 1
    store = dist.PrefixStore(f"group-{board._groups}", board._store)
    group = share_memory(board, store, patience, self_slot)  # type: ignore[arg-type]
    assert group is not None
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        for numel in (8191, 8192, 16_385, 2 * self_slot // dtype.itemsize + 12_345):
            parts = [given(rank, seed, dtype, [numel]) for rank in range(board.world_size)]
            assert same_bits(group.all_reduce(parts[group.rank].clone()), summed(parts)), numel
    group.close()


def check_mixed_sequences(board: Board) -> None:
    """Any calls in any order give what torch gives, while ranks come early and late."""
    group, world_size = board.group(), board.world_size
    draw = random.Random(world_size)
    late = random.Random(group.rank)
    for seed in range(CALLS):
        kind = draw.choice(("all_reduce", "all_gather", "gather", "broadcast", "agree"))
        dtype = draw.choice(SUMMED if kind == "all_reduce" else MOVED)
        shape = [draw.choice((1, 2, 3, 7, 33)) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.1:
            shape[0] = draw.choice((0, 2000))
        dim = draw.randrange(-len(shape), len(shape))
        parts = [given(rank, seed, dtype, shape) for rank in range(world_size)]
        mine = parts[group.rank].clone()
        if late.random() < 0.1:
            sum(range(late.randrange(20_000)))
        where = f"call {seed}: {kind} of {shape} {dtype}, dim {dim}"
        if kind == "all_reduce":
            assert same_bits(group.all_reduce(mine), summed(parts)), where
        elif kind == "broadcast":
            assert same_bits(group.broadcast(mine), parts[0]), where
        elif kind == "agree":
            votes = [[draw.randint(-(2**63), 2**63 - 1) for _ in range(9)] for _ in parts]
            wanted = [min(column) for column in zip(*votes, strict=True)]
            assert group.agree(votes[group.rank]) == wanted, where
        else:
            got = getattr(group, kind)(mine, dim=dim)
            if kind == "gather" and group.rank:
                assert got is None, where
            else:
                assert same_bits(got, torch.cat(parts, dim=dim)), where
    group.close()


def check_common(board: Board) -> None:
    """What holds of every group, and that a group leaves no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    group = board.group()
    check_group(group)
    group.close()
    group.close()
    del group
    assert len(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------------------------- what goes wrong


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_mismatches(board: Board) -> None:
    floats, whole = torch.ones(8), torch.ones(8, dtype=torch.int64)
    calls: list[tuple[str, Callable[[SharedMemoryGroup], object]]] = [
        ("sum of 8 float32 as call 2", lambda g: g.all_reduce(floats)),
        ("sum of 9 float32 as call 2", lambda g: g.all_reduce(torch.ones(9))),
        ("sum of 8 int64 as call 2", lambda g: g.all_reduce(whole)),
        ("min of 8 int64 as call 2", lambda g: g.agree([1] * 8)),
        ("max of 8 int64 as call 2", lambda g: g.agree([1] * 8, AgreeOp.MAX)),
        ("all_gather of 8 float32 as call 2", lambda g: g.all_gather(floats)),
        ("gather of 8 float32 as call 2", lambda g: g.gather(floats)),
        ("broadcast of 90000 float32 as call 2", lambda g: g.broadcast(torch.ones(90_000))),
    ]
    for (one, first), (other, second) in zip(calls, calls[1:] + calls[:1], strict=True):
        group = board.group()
        group.agree([0])
        odd = group.rank == board.world_size - 1
        last = board.world_size - 1
        said = refused(LockstepError, lambda: (second if odd else first)(group))  # noqa: B023
        if odd:
            assert f"rank {last} is in {other} while rank 0 is in {one}" in said, said
        else:
            assert f"rank {group.rank} is in {one}" in said and other in said, said
        assert refused(PeerLostError, lambda: group.agree([0])) == said  # noqa: B023
        group.close()


def check_a_rank_that_left(board: Board) -> None:
    group = board.group()
    group.all_reduce(torch.ones(3))
    if group.rank == 1:
        group.close()
        assert "has left" in refused(PeerLostError, lambda: group.agree([1]))
        return
    # Or the other of the two that stayed, if that one has left by now for the same reason.
    assert "has ended" in refused(PeerLostError, lambda: group.agree([1]))
    group.close()


def check_a_wait_without_end(board: Board) -> None:
    patience = Patience(spin_us=1, yield_us=1, timeout=timedelta(milliseconds=1))
    group = board.try_group(patience)
    assert group is not None
    if group.rank == 0:
        assert "did not come to sum of 3 float32 as call 1" in refused(
            PeerLostError, lambda: group.all_reduce(torch.ones(3))
        )
    board.agree([0])
    group.close()


def failing(text: str) -> Callable[..., object]:
    """Raises anew each time: an error that is kept keeps what its frames had open."""

    def fail(*args: object, **options: object) -> object:
        raise OSError(text)

    return fail


def check_fallbacks(board: Board) -> None:
    """One rank cannot: none does, rank 0 says why, and nothing stays open."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    shared_memory.logger.addHandler(handler)
    shared_memory.logger.setLevel(logging.INFO)
    last = board.world_size - 1
    ways = (
        (0, "os.memfd_create", failing("no memory"), "rank 0: no shared memory: no memory"),
        (0, "os.posix_fallocate", failing("full"), "rank 0: no shared memory: full"),
        (last, "os.pidfd_open", failing("no such call"), "the others: no such call"),
        (last, "mmap.mmap", failing("no room"), "the others: no room"),
        (last, "os.pread", [b"?"], "rank 0's memory is not where it should be"),
        (last, "os.readlink", ["pid:[1]"], f"rank {last} is on another machine"),
        (last, "mstar_tp.common.env.wants_shared_memory", [False], "MSTAR_TP_SHARED_MEMORY is 0"),
        (last, "mstar_tp.distributed.shared_memory.load_library", [None], "kernels are off"),
    )
    for rank, name, effect, wanted in ways:
        before = len(os.listdir("/proc/self/fd"))
        fault = mock.patch(name, side_effect=effect) if board.rank == rank else nullcontext()
        with fault:
            assert board.try_group() is None, name
        assert len(os.listdir("/proc/self/fd")) == before, name
        if board.rank == 0:
            assert len(messages) == 1 and "go over gloo" in messages[0], messages
            assert wanted in messages[0], messages
        messages.clear()


def check_a_killed_rank(board: Board) -> None:
    """The last rank is killed inside a sum of many rounds."""
    group = board.group()
    group.agree([0])
    if group.rank == board.world_size - 1:
        begun = threading.Event()
        kill = lambda: begun.wait() and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        threading.Thread(target=kill, daemon=True).start()
        begun.set()
    x = torch.ones(1 << 24)
    said = refused(PeerLostError, lambda: [group.all_reduce(x) for _ in range(1000)])
    assert "has ended, and rank" in said, said
    assert refused(PeerLostError, lambda: group.broadcast(x)) == said


def check_a_stopped_rank(board: Board) -> None:
    """It is waited for, and the sum is right when it goes on. The parent wakes it."""
    group = board.group()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    x = torch.full((5000,), float(group.rank))
    assert torch.equal(
        group.all_reduce(x), torch.full((5000,), float(sum(range(group.world_size))))
    )
    group.close()


def check_the_default_start(board: Board) -> None:
    """``init_groups`` shares memory, unless it is told not to."""
    for number, wanted in enumerate((SharedMemoryGroup, TorchGroup, SharedMemoryGroup)):
        os.environ["MSTAR_TP_SHARED_MEMORY"] = "0" if wanted is TorchGroup else "1"
        store = dist.PrefixStore(f"start-{number}", board._store)
        meeting = start.Rendezvous(store, board.rank, board.world_size)
        group = start.init_groups(torch.device("cpu"), meeting).tp
        assert type(group) is wanted
        assert group.agree([board.rank, -board.rank]) == [0, 1 - board.world_size]
        start.publish(f"fact-{board.rank}", "x")
        board.agree([0])
        start.destroy_groups()


EVERYWHERE = (check_common, check_sums, check_mixed_sequences)
CHECKS: dict[int, tuple[Callable[[Board], None], ...]] = {
    2: (check_the_default_start, *EVERYWHERE, check_mismatches, check_a_wait_without_end),
    3: (*EVERYWHERE, check_shares, check_mismatches, check_a_rank_that_left, check_fallbacks),
    4: (*EVERYWHERE, check_a_stopped_rank, check_a_killed_rank),
    5: (*EVERYWHERE, check_shares),
}


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    assert shared_memory.load_library() is not None
    return max(_run(folder, world_size) for world_size in CHECKS)


def _run(folder: Path, world_size: int) -> int:
    pids: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                board = Board(folder / f"store-{world_size}", rank, world_size)
                for check in CHECKS[world_size]:
                    check(board)
                    if rank == 0:
                        print(f"passed {world_size} {check.__name__}", flush=True)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids[pid] = rank
    worst = 0
    while pids:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
            continue
        rank = pids.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not (code == -signal.SIGKILL and rank == world_size - 1):
            print(f"rank {rank} of {world_size} ended with {code}", flush=True)
            worst = 1
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return worst


if __name__ == "__main__":
    sys.exit(main())
