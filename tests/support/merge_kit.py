"""Merging in tests: options that say no more than a test wants to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mstar_tp.tools.merge.merge_command import MergeOptions, merge


def merged(
    model: Path,
    adapters: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> Path:
    told = MergeOptions(
        model=model,
        adapters=tuple(adapters),
        weights=tuple(weights or [1.0] * len(adapters)),
        out=out,
        **{"dtype": None, "max_shard_bytes": 1 << 40, "force": False, **options},
    )
    merge(told)
    return out
