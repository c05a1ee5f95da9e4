"""The flags of the commands in ``tools/``, and how each is run.

A command's own modules are imported when it runs: help and a bad flag wait for no torch.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from mstar_tp.cli.offline import run_offline
from mstar_tp.common.errors import ConfigError
from mstar_tp.common.units import counted
from mstar_tp.config import LoraConfig
from mstar_tp.config.parsers import add_command, count, positive
from mstar_tp.config.server_flags import add_config_arguments

Commands = Any  # argparse keeps the type of add_subparsers to itself

DEFAULT_SHARD = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20,
          "GIB": 1 << 30}  # fmt: skip
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_INTERVAL_S = 2.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0


def add_check(commands: Commands) -> None:
    """Add ``check`` to argparse's ``commands``."""
    check = add_command(
        commands,
        "check",
        _check,
        help="say all that is wrong with a deployment, before any rank starts",
        description="Check what serve would start with the same file and flags: keys, model, "
        "weight files' headers, every adapter, memory, addresses. All problems come in one report. "
        "Reads headers only, unless --digests is given. Exit code 0 when it can be started, "
        "1 when not.",
    )
    add_config_arguments(check)
    _add_report_arguments(check)


def add_inspect(commands: Commands) -> None:
    """Add ``inspect`` to argparse's ``commands``."""
    inspect = add_command(
        commands,
        "inspect",
        _inspect,
        help="say what an adapter, a folder of adapters or a model is",
        description="Say what is at PATH (an adapter, a folder of adapters, a base model), and all "
        "for which it would be refused. Exit code 0 when all of it can be served, 1 when not.",
    )
    inspect.add_argument("path", metavar="PATH", help="an adapter, a folder of them, or a model")
    inspect.add_argument(
        "--model", metavar="FOLDER", help="validate adapters against this base model, too"
    )
    inspect.add_argument(
        "--tensor-parallel-size",
        "--tp",
        "-tp",
        dest="tp",
        type=positive,
        default=1,
        metavar="N",
        help="say what each of N ranks would hold (default 1)",
    )
    inspect.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype that the model would be served in (default auto)",
    )
    lora = LoraConfig()
    inspect.add_argument(
        "--max-lora-rank",
        type=positive,
        default=lora.max_lora_rank,
        metavar="N",
        help="as serve's (default %(default)s)",
    )
    inspect.add_argument(
        "--max-lora-saved-rows",
        type=count,
        default=lora.max_lora_saved_rows,
        metavar="N",
        help="as serve's (default %(default)s)",
    )
    _add_report_arguments(inspect)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--digests",
        action="store_true",
        help="read the weights too: numbers that are not finite, copies of base weights, digests",
    )
    parser.add_argument("--all", action="store_true", help="show every line of long lists")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_replay(commands: Commands) -> None:
    """Add ``replay`` to argparse's ``commands``."""
    replay = add_command(
        commands,
        "replay",
        _replay,
        help="rebuild a rank's tables from what it recorded, and compare two recordings",
        description="Rebuild a rank's slots, CPU cache, served names, pages and requests at any "
        "step from what it recorded with --record: no device, no files, no other ranks. Exit code "
        "1 when two recordings differ, or when the rank's own tables were not what the order it "
        "applied makes of them.",
    )
    replay.add_argument(
        "file",
        metavar="FILE",
        help="a rank's recording, or what --record was given (rank 0's is read then)",
    )
    replay.add_argument(
        "--step", type=int, metavar="N", help="show step N, and the tables before and after it"
    )
    replay.add_argument(
        "--compare",
        metavar="OTHER",
        help="a second recording: name the first step where the two differ, and in which table",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")


def add_merge(commands: Commands) -> None:
    """Add ``merge`` to argparse's ``commands``."""
    parser = add_command(
        commands,
        "merge",
        _merge,
        help="write a base model with adapters added into its weights",
        description="Write a model that computes what MODEL computes with the adapters: the base "
        "plus the weighted sum of their deltas, added in float32 and rounded once. Adapters are "
        "checked as for serving. The result is written beside DIR and takes its name when it is "
        "whole. A head that is tied to the embedding gets a weight of its own where the two "
        "would differ.",
        epilog="example: mstar-tp merge base adapters/sql adapters/poet --weights 0.7,0.3 "
        "--out merged",
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


def _merge(args: argparse.Namespace) -> int:
    weights = parse_weights(args.weights, len(args.adapters))
    max_shard_bytes = parse_size(args.max_shard_size)

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


def add_convert(commands: Commands) -> None:
    """Add ``convert`` to argparse's ``commands``."""
    parser = add_command(
        commands,
        "convert",
        _convert,
        help="write a pickled, Kohya or diffusers adapter as PEFT safetensors",
        description="Write SRC as a PEFT folder with adapter_model.safetensors and "
        "adapter_config.json. A pickle (.bin, .pt) is read by a process of its own that runs no "
        "code of it, can open no other file and has memory and time for a file of its size. Only "
        "plain LoRA is converted; everything else is refused by name.",
        epilog="example: mstar-tp convert adapters/old --out adapters/new",
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


def _convert(args: argparse.Namespace) -> int:
    from mstar_tp.tools.convert.convert_command import ConvertOptions, convert

    options = ConvertOptions(source=args.source, out=args.out, model=args.model, force=args.force)
    return run_offline(lambda: convert(options))


def add_top(commands: Commands) -> None:
    """Add ``top`` to argparse's ``commands``."""
    parser = add_command(
        commands,
        "top",
        _top,
        help="watch a running server: ranks, slots by adapter, queues, rates",
        description="Watch a running server on a terminal: ranks, slots by adapter, queues, tokens "
        "a second, KV pages, restarts. Reads its /metrics and /debug/state. Ctrl-C ends it. Exit "
        "code 1 when nothing answers at URL.",
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=DEFAULT_URL,
        help="where the server listens (default %(default)s)",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        help="the server's admin key, for slots (default: MSTAR_TP_ADMIN_KEY)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="one of its API keys, for slots where it has no admin key (default: the first of "
        "MSTAR_TP_API_KEY)",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=DEFAULT_INTERVAL_S,
        help="how often to look (default %(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, an interval apart, print one frame without colours, and end",
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        )
    return seconds


def _top(args: argparse.Namespace) -> int:
    from mstar_tp.tools.top.top_command import top_command

    return top_command(args)


def _check(args: argparse.Namespace) -> int:
    from mstar_tp.tools.check.check_command import check_command

    return check_command(args)


def _inspect(args: argparse.Namespace) -> int:
    from mstar_tp.tools.check.check_command import inspect_command

    return inspect_command(args)


def _replay(args: argparse.Namespace) -> int:
    from mstar_tp.tools.replay.replay_command import replay

    return replay(args.file, step=args.step, other=args.compare, as_json=args.json)
