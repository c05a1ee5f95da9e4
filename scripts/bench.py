#!/usr/bin/env python3
"""Measure kernels, decode steps, or scale: ``python scripts/bench.py PART --help``.

Serving, adapter churn and cached prefixes are measured by ``mstar-tp bench``, which users run too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.benchmark_flags import benchmark_parser  # noqa: E402

from mstar_tp.common.errors import MstarError  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part; 1 when it failed, 2 on a bad flag."""
    args = benchmark_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except MstarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
