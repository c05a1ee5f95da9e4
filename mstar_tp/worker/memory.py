"""The memory that this rank's process takes now."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import torch

from mstar_tp.wire.stats import ProcessStats

_STATM = Path("/proc/self/statm")


def process_stats() -> ProcessStats:
    """Cheap: three small reads, none of which waits for a device."""
    allocated = reserved = total = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocated = torch.cuda.memory_allocated()
        reserved = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return ProcessStats(
        resident_bytes=_resident_bytes(),
        cpu_s=time.process_time(),
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        device_total_bytes=total,
    )


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the most that it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
