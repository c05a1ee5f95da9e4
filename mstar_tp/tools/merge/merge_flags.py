"""The flags of ``mstar-tp merge``. Imports no torch until the command runs."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.units import counted

DEFAULT_SHARD = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20,
          "GIB": 1 << 30}  # fmt: skip


def add_merge(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "merge",
        help="write a base model with adapters added into its weights",
        description="Write a model that computes what MODEL computes with the adapters: the base "
        "plus the weighted sum of their deltas, added in float32 and rounded once. Adapters are "
        "checked as for serving. The result is written beside DIR and takes its name when it is "
        "whole. A head that is tied to the embedding gets a weight of its own where the two "
        "would differ.",
        epilog="example: mstar-tp merge base adapters/sql adapters/poet --weights 0.7,0.3 "
        "--out merged",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the base model")
    parser.add_argument(
        "adapters",
        metavar="ADAPTER",
        nargs="+",
        type=Path,
        help="a PEFT folder, or a Kohya or diffusers safetensors file",
    )
    parser.add_argument("--out", required=True, metavar="DIR", type=Path, help="the new folder")
    parser.add_argument(
        "--weights",
        metavar="W,W,...",
        help="what each adapter's delta is multiplied with (default 1 each); write --weights=-1 "
        "for one that begins with a minus",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the result; auto: every tensor keeps the base's (default)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=DEFAULT_SHARD,
        help="most bytes of one weights file, as 5GB or 500MiB (default %(default)s)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace DIR if it holds a model already"
    )
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    weights = parse_weights(args.weights, len(args.adapters))
    max_shard_bytes = parse_size(args.max_shard_size)

    from mstar_tp.cli.offline import run_offline
    from mstar_tp.tools.merge.merge_command import MergeOptions, merge

    options = MergeOptions(
        model=args.model,
        adapters=tuple(args.adapters),
        weights=weights,
        out=args.out,
        dtype=None if args.dtype == "auto" else args.dtype,
        max_shard_bytes=max_shard_bytes,
        force=args.force,
    )
    return run_offline(lambda: merge(options))


def parse_weights(text: str | None, count: int) -> tuple[float, ...]:
    """One finite number an adapter.

    Raises:
        ConfigError: there are more or fewer, or one is none.
    """
    if text is None:
        return (1.0,) * count
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        weights = (math.nan,)
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"--weights is {text!r}, wanted numbers with commas between, as 1.0,0.5")
    if len(weights) != count:
        raise ConfigError(
            f"--weights gives {counted(len(weights), 'number')} for {counted(count, 'adapter')}: "
            "give one for each"
        )
    return weights


def parse_size(text: str) -> int:
    """Bytes, from a number with a unit or without.

    Raises:
        ConfigError: it is no size of at least a byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size < 1:
        raise ConfigError(f"--max-shard-size is {text!r}, wanted a size as 5GB or 500MiB")
    return size
