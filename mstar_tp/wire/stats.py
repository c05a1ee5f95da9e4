"""Parts of a rank's answer to a Measure: its steps, what its process takes, what pages it keeps.

No torch.
"""

from __future__ import annotations

import msgspec

from mstar_tp.common.histogram import Buckets


class PhaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """The time that one phase took, over all steps that came to it."""

    phase: str
    seconds: Buckets


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps: seconds by phase, rows and tokens of each."""

    phases: tuple[PhaseStats, ...]
    rows: Buckets
    tokens: Buckets


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process. On a CPU rank there is no device."""

    resident_bytes: int
    cpu_s: float
    device_allocated_bytes: int = 0
    """Taken by tensors."""
    device_reserved_bytes: int = 0
    """Held by torch's allocator, tensors included."""
    device_total_bytes: int = 0


class PrefixStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of KV pages that are kept for requests whose tokens begin alike.

    They run since the start; all are 0 where prefix caching is off.
    """

    tokens_queried: int = 0
    """The prompt tokens of the requests that began to run."""
    tokens_cached: int = 0
    """The tokens of these that kept pages held."""
    pages: int = 0
    """The pages that could be leased now, those that requests hold among them."""
    evictions: int = 0
    """Kept pages that were given to a request for something else."""
