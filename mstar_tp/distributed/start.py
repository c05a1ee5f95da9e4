"""Joining and leaving the group of ranks, and the small facts ranks tell each other before that.

Main thread, at start and stop. A group of one rank never touches torch.distributed.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as meet

from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError, PeerLostError
from mstar_tp.distributed.comm import JointGroups, SingleGroup, TorchGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup, share_memory
from mstar_tp.kernels.collectives import Patience

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective may wait for a peer's slow read, so only a lost peer ends it early."""

PATIENCE = Patience(spin_us=4, yield_us=100, timeout=COLLECTIVE_TIMEOUT)
"""Yields soon: a rank that spins on a core that its peer needs waits for itself."""


class Rendezvous(NamedTuple):
    """The meeting point of the ranks of one group, and of no others."""

    store: Store
    rank: int
    world_size: int


def file_rendezvous(path: str, place: env.RankEnv) -> Rendezvous:
    """Ranks of one machine meet in the file ``path``, which no rank had before this group."""
    return Rendezvous(FileStore(path, place.world_size), place.rank, place.world_size)


def env_rendezvous(place: env.RankEnv) -> Rendezvous:
    """Return where torchrun's environment says.

    The agent's store outlives a group: keys are named by how often the group was started again, so
    that no rank meets the addresses of a dead one.

    Raises:
        PeerLostError: the store cannot be reached.
    """
    try:
        store, rank, world_size = next(meet("env://"))
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(f"this rank cannot reach torchrun's store: {error}") from error
    return Rendezvous(PrefixStore(f"start-{place.restarts}", store), rank, world_size)


def group_name(meeting: Rendezvous | None, timeout_s: float) -> str:
    """A name that rank 0 draws and every rank of the group has; no other group ever has it.

    Raises:
        PeerLostError: rank 0 did not come within ``timeout_s``.
    """
    drawn = secrets.token_hex(8)
    if meeting is None:
        return drawn
    try:
        if meeting.rank == 0:
            meeting.store.set("name", drawn)
        meeting.store.wait(["name"], timedelta(seconds=timeout_s))
        return str(meeting.store.get("name"), "utf-8")
    except RuntimeError as error:
        raise PeerLostError(f"rank 0 did not start within {timeout_s:g} s: {error}") from error


_store: Store | None = None
_shared: SharedMemoryGroup | None = None
_local: dict[str, str] = {}


def init_groups(device: torch.device, rendezvous: Rendezvous | None = None) -> JointGroups:
    """Join the group that torchrun's environment (or ``rendezvous``) describes.

    CPU: a gloo group for tensors and another for agreements or, on one machine, a group over shared
    memory for both (``shared_memory`` says when there is none). CUDA: NCCL and a gloo twin; the
    current device becomes ``device``, or the local rank's when it has no index. Collective.

    Raises:
        ConfigError: the environment is incomplete, or there is no such GPU.
        PeerLostError: the other ranks cannot be reached.
    """
    global _store, _shared  # noqa: PLW0603 - torch.distributed's own state is the process's too
    place = env.rank_env()
    if device.type == "cuda":
        _use_gpu(place.local_rank if device.index is None else device.index)
    world_size = place.world_size if rendezvous is None else rendezvous.world_size
    if world_size == 1:
        return JointGroups(SingleGroup())
    if rendezvous is not None or place.local_world_size == world_size:
        _stay_on_this_machine()
    try:
        store, rank, world_size = rendezvous or env_rendezvous(place)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        twin = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        assert dist.group.WORLD is not None
        group = TorchGroup(dist.group.WORLD, twin)
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(f"this rank cannot join its group of {world_size}: {error}") from error
    if device.type == "cpu":
        try:
            _shared = share_memory(group, PrefixStore("memory", store), PATIENCE)
        except RuntimeError as error:  # gloo's and the store's
            raise PeerLostError(f"a rank went away while the group started: {error}") from error
    _store = PrefixStore("facts", store)
    return JointGroups(_shared or group)


def destroy_groups() -> None:
    """Leave the group. Idempotent; a no-op for a group of one."""
    global _store, _shared  # noqa: PLW0603
    _store = None
    if _shared is not None:
        _shared.close()
        _shared = None
    _local.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def publish(key: str, value: str) -> None:
    """Tell every rank of the group ``value``, once a key. After ``init_groups``."""
    if _store is None:
        _local[key] = value
    else:
        _store.set(key, value)


def lookup(key: str, timeout_s: float) -> str:
    """Return what some rank published under ``key``; waits for it.

    After ``init_groups``.

    Raises:
        PeerLostError: nobody did within ``timeout_s``.
    """
    if _store is None:
        return _local[key]
    try:
        _store.wait([key], timedelta(seconds=timeout_s))
        return str(_store.get(key), "utf-8")
    except RuntimeError as error:
        raise PeerLostError(f"no rank published {key} within {timeout_s:g} s: {error}") from None


def compute_threads(configured: int | None, local_world_size: int | None = None) -> int:
    """Threads a CPU rank computes with: as configured, or its share of this process's cores.

    ``local_world_size``: ranks on this machine; default: as torchrun says.
    """
    if configured is not None:
        return configured
    if local_world_size is None:
        local_world_size = env.rank_env().local_world_size
    if hasattr(os, "sched_getaffinity"):  # not on every system
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // local_world_size)


def check_gpu(index: int) -> None:
    """Raises ConfigError: this machine has no such GPU."""
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device: rank wants GPU {index}, this machine has {torch.cuda.device_count()}: "
            "start fewer ranks on it or choose --device cpu"
        )


def use_device(device: torch.device) -> None:
    """Make ``device`` this thread's own.

    torch keeps a current GPU for each thread, the first one at first, and kernels, streams and
    events that name none go there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _use_gpu(index: int) -> None:
    check_gpu(index)
    torch.cuda.set_device(index)


def _stay_on_this_machine() -> None:
    """Collectives of ranks on one machine are nobody else's business: keep them on loopback."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env.prefer_gloo_interface("lo")
