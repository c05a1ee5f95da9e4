"""The memory that this machine has for ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


class MemoryInfo(NamedTuple):
    """Bytes; None where the system does not say."""

    total: int | None
    free: int | None


def host_memory_info() -> MemoryInfo:
    """This machine's memory, or what its container may use of it."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return MemoryInfo(None, None)
    known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
    total, free = known.get("MemTotal"), known.get("MemAvailable")
    limit, used = _number(CGROUP_LIMIT), _number(CGROUP_USED)
    if limit is not None and total is not None and limit < total:
        total = limit
        if used is not None and free is not None:
            free = min(free, max(0, limit - used))
    return MemoryInfo(total, free)


def gpu_memory_info(count: int) -> MemoryInfo:
    """The least total and free bytes among the first ``count`` GPUs."""
    import torch

    found = [torch.cuda.mem_get_info(index) for index in range(count)]
    return MemoryInfo(min(total for _, total in found), min(free for free, _ in found))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or one without a limit
        return None
