"""Collectives of CPU ranks over shared memory against gloo's: real processes, one thread each.

Both ways take turns, a block of calls each; a figure is the median over the blocks of a block's
mean on rank 0. all_reduce: float32 of that many KB, in place; agree: three int64 votes; broadcast:
eight int64, rank 0's to all; gather: [8, 256] float32 to rank 0.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from mstar_tp.common.errors import MstarError
from mstar_tp.distributed import start
from mstar_tp.distributed.comm import CommGroup, TorchGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup


class CollectiveTimes(NamedTuple):
    """Microseconds a call."""

    tp: int
    name: str
    num_bytes: int
    gloo_us: float
    shared_us: float


def measure_collectives(
    tp: int, sizes_kb: Sequence[int], blocks: int = 15
) -> list[CollectiveTimes]:
    """Fork ``tp`` ranks; rank 0's figures.

    Raises:
        MstarError: a rank failed, or these ranks cannot share memory.
    """
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as folder:
        pids = []
        for rank in range(tp):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _rank(Path(folder), rank, tp, sizes_kb, blocks)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            raise MstarError(
                f"collectives at tp {tp}: a rank failed; ranks of one machine that cannot share "
                "memory say so with MSTAR_TP_LOG_LEVEL=INFO"
            )
        rows = (Path(folder) / "rows").read_bytes()
        return msgspec.json.decode(rows, type=list[CollectiveTimes])


def _sum(x: torch.Tensor, group: CommGroup) -> None:
    group.all_reduce(x)


def _rank(folder: Path, rank: int, tp: int, sizes_kb: Sequence[int], blocks: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), tp)
    shared = start.init_groups(torch.device("cpu"), start.Rendezvous(store, rank, tp)).tp
    if not isinstance(shared, SharedMemoryGroup):
        raise MstarError("these ranks cannot share memory")
    world = dist.group.WORLD
    assert world is not None
    gloo = TorchGroup(world, dist.new_group(backend="gloo"))

    def timed(name: str, num_bytes: int, call: Callable[[CommGroup], object]) -> CollectiveTimes:
        calls = max(5, min(100, (4096 << 10) // max(num_bytes, 1)))
        means: tuple[list[float], list[float]] = ([], [])
        groups: tuple[CommGroup, CommGroup] = (gloo, shared)
        for block in range(blocks + 1):
            for group, found in zip(groups, means, strict=True):
                shared.agree([0])
                begin = time.perf_counter()
                for _ in range(calls):
                    call(group)
                if block:  # the first warms up
                    found.append(1e6 * (time.perf_counter() - begin) / calls)
        return CollectiveTimes(tp, name, num_bytes, *(median(found) for found in means))

    rows = []
    for kb in sizes_kb:
        x = torch.ones(kb << 8)
        rows.append(timed("all_reduce", kb << 10, partial(_sum, x)))
    ids, logits = torch.arange(8), torch.ones(8, 256)
    rows.append(timed("agree", 24, lambda group: group.agree([1, 2, 3])))
    rows.append(timed("broadcast", ids.nbytes, lambda group: group.broadcast(ids)))
    rows.append(timed("gather", logits.nbytes, lambda group: group.gather(logits)))
    if rank == 0:
        (folder / "rows").write_bytes(msgspec.json.encode(rows))
    shared.agree([0])
    start.destroy_groups()
