"""Pins that a gloo group's collectives are single-process maths, for ranks that torchrun started,
and that a peer's death ends a collective instead of hanging it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mstar_tp.distributed.comm import SingleGroup, TorchGroup
from mstar_tp.distributed.start import compute_threads, destroy_groups, init_groups, lookup, publish

CHECKS = Path(__file__).with_name("comm_checks.py")

ABANDONED = """
import os, signal, sys, torch
import torch.distributed as dist
from mstar_tp.distributed.start import Rendezvous, init_groups
torch.set_num_threads(1)
rank = int(sys.argv[2])
group = init_groups(torch.device("cpu"), Rendezvous(dist.FileStore(sys.argv[1], 2), rank, 2)).tp
group.agree([rank])
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.agree([rank])
except RuntimeError as error:
    print("ended:", str(error)[:40], flush=True)
    os._exit(0)
"""


def test_every_collective_over_gloo_equals_single_process_maths() -> None:
    world_size = 4
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(world_size), str(CHECKS)),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=_environment(1)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(world_size):
        assert f"rank {rank} of {world_size} passed" in done.stdout


def test_a_killed_peer_ends_a_collective_with_an_error(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ABANDONED, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(rank + 1),
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 0 and output.startswith("ended:")
        assert ranks[1].wait(timeout=60) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_one_rank_needs_no_torch_distributed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    groups = init_groups(torch.device("cpu"))
    assert isinstance(groups.tp, SingleGroup)
    assert not torch.distributed.is_initialized()
    publish("key", "value")
    assert lookup("key", 1) == "value"
    assert groups.agree([4, -4]) == [4, -4] and groups.same([1]) == [True]
    destroy_groups()


def test_agreeing_without_a_gloo_twin_is_refused_with_the_remedy() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        with pytest.raises(ValueError, match="gloo twin"):
            TorchGroup(world, None).agree([1])
    finally:
        torch.distributed.destroy_process_group()


def test_threads_are_a_ranks_share_of_the_cores_unless_configured() -> None:
    cores = len(os.sched_getaffinity(0))
    assert compute_threads(3, 2) == 3
    assert compute_threads(None, 1) == cores
    assert compute_threads(None, cores) == 1
    assert compute_threads(None, 10 * cores) == 1


def _environment(seed: int) -> dict[str, str]:
    return dict(
        os.environ, PYTHONHASHSEED=str(seed), OMP_NUM_THREADS="1", MSTAR_TP_SHARED_MEMORY="0"
    )
