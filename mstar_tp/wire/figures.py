"""Parts of a rank's answer to a Measure: its steps, and what its process takes. No torch."""

from __future__ import annotations

import msgspec

from mstar_tp.histogram import Buckets


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How long one phase took, over all steps that came to it."""

    phase: str
    seconds: Buckets


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps: seconds by phase, rows and tokens of each."""

    phases: tuple[PhaseFigures, ...]
    rows: Buckets
    tokens: Buckets


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process. On a CPU rank there is no device."""

    resident_bytes: int
    cpu_s: float
    device_allocated_bytes: int = 0
    """Taken by tensors."""
    device_reserved_bytes: int = 0
    """Held by torch's allocator, tensors included."""
    device_total_bytes: int = 0
