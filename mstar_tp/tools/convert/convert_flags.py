"""The flags of ``mstar-tp convert``. Imports no torch until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_convert(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "convert",
        help="write a pickled, Kohya or diffusers adapter as PEFT safetensors",
        description="Write SRC as a PEFT folder with adapter_model.safetensors and "
        "adapter_config.json. A pickle (.bin, .pt) is read by a process of its own that runs no "
        "code of it, can open no other file and has memory and time for a file of its size. Only "
        "plain LoRA is converted; everything else is refused by name.",
        epilog="example: mstar-tp convert adapters/old --out adapters/new",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="an adapter's folder, or its file alone"
    )
    parser.add_argument("--out", required=True, metavar="DIR", type=Path, help="the new folder")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="the base model: names and shapes are checked against it, any spelling of its modules "
        "is read, and factors of fused projections are split",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace DIR if it holds an adapter already"
    )
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from mstar_tp.cli.offline import run_offline
    from mstar_tp.tools.convert.convert_command import ConvertOptions, convert

    options = ConvertOptions(source=args.source, out=args.out, model=args.model, force=args.force)
    return run_offline(lambda: convert(options))
