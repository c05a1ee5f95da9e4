"""The flags of ``mstar-tp bench`` and its parts. Imports no torch until a part runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mstar_tp.common.errors import ConfigError
from mstar_tp.config.parsers import ClearParser, count, positive, positives

LOADS = ("serving", "churn", "prefix", "scale")
"""Parts with a load generator."""
Parts = Any  # argparse keeps the type of add_subparsers to itself
DESCRIPTION = (
    "Measure this build on this machine, and a peer beside it on the same work. Prints a table "
    "with the machine, the versions and the command; --json keeps every figure. Ratios are of "
    "medians, taken in turn. Kernels, steps and scale are measured by scripts/bench.py in a "
    "checkout."
)

_NUMBER: dict[str, Any] = {"type": positive, "metavar": "N"}
SHARED: dict[str, dict[str, Any]] = {
    "--api-key": {
        "metavar": "KEY",
        "help": "bearer token for the servers (default none)",
    },
    "--peer-url": {
        "metavar": "URL",
        "help": "a second server, measured in turn on the same work",
    },
    "--requests": {**_NUMBER, "help": "requests of a run"},
    "--concurrency": {**_NUMBER, "help": "requests in flight"},
    "--prompt-tokens": {**_NUMBER, "help": "of a prompt"},
    "--max-tokens": {**_NUMBER, "help": "of an answer"},
    "--runs": {**_NUMBER, "help": "measured runs"},
    "--tp": {**_NUMBER, "help": "ranks"},
    "--seed": {"type": count, "help": "seed of the first run; each further one adds 1"},
    "--timeout": {
        "type": float,
        "metavar": "S",
        "help": "a request ends after S seconds without a byte",
    },
}
"""The arguments that several parts take, without their defaults."""


def add_shared(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any],
    table: Mapping[str, Mapping[str, Any]] = SHARED,
) -> None:
    """Add arguments of ``table`` with these defaults, which help tells; None and "" mean unset."""
    for flag, default in defaults.items():
        told = "" if default in (None, "") else f" (default {default})"
        parser.add_argument(
            flag, default=default, **{**table[flag], "help": f"{table[flag]['help']}{told}"}
        )


def add_bench(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    bench = commands.add_parser(
        "bench",
        help="measure serving, adapter churn and cached prefixes, beside a peer",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parts = bench.add_subparsers(required=True, metavar="PART", parser_class=ClearParser)
    _add_serving(parts)
    _add_churn(parts)
    _add_prefix(parts)


def add_part(
    parts: Parts, name: str, help_: str, more: str = "", *, package: str = "mstar_tp.bench"
) -> argparse.ArgumentParser:
    """Add the parser of one part; the module ``package.NAME`` has its function ``bench_NAME``."""
    description = f"{help_[0].upper()}{help_[1:]}. {more}".strip()
    parser: argparse.ArgumentParser = parts.add_parser(
        name, help=help_, description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write every figure to this file"
    )
    parser.set_defaults(command=_runner(name, package))
    return parser


def _runner(name: str, package: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        if name in LOADS and find_spec("aiohttp") is None:
            raise ConfigError(f"bench {name} needs aiohttp: install mstar-tp[bench]")
        from mstar_tp.bench.report import show, write_json

        report = getattr(import_module(f"{package}.{name}"), f"bench_{name}")(args)
        show(report)
        if args.json is not None:
            write_json(report, args.json)
        return 1 if report.failed else 0

    return run


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what a load generator asks, and of which servers."""
    add = parser.add_argument
    add("--url", help="a server that is up, with or without /v1; default: start ours")
    add_shared(parser, {"--api-key": "", "--peer-url": None})
    add(
        "--adapters", type=count, default=0, metavar="N", help="ask for the first N adapters listed"
    )
    add_shared(parser, {"--requests": 64})
    add_shared(parser, {"--concurrency": 8, "--prompt-tokens": 64, "--max-tokens": 64})
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="folder or tokenizer.json: send words; default: random token ids",
    )
    add(
        "--id-low",
        type=count,
        default=300,
        metavar="ID",
        help="smallest of random ids (default 300)",
    )
    add(
        "--id-high",
        type=positive,
        default=2000,
        metavar="ID",
        help="one past the largest (default 2000)",
    )
    add_shared(parser, {"--seed": 0, "--runs": 1, "--timeout": 300})
    add_made(parser)
    add(
        "--max-loras",
        type=positive,
        metavar="N",
        help="device slots of the built-in server (default: as many as --adapters)",
    )
    add(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="ranks of the built-in server (default 1)",
    )
    add(
        "serve",
        nargs="*",
        metavar="SERVE",
        help="behind --: what mstar-tp serve takes, to start ours; default: a built-in model",
    )


def add_made(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the random model and adapters that are made where none are given."""
    parser.add_argument(
        "--size",
        choices=("nano", "tiny", "small"),
        default="tiny",
        help="the built-in model: 0.3, 4 or 387 million parameters (default %(default)s)",
    )
    parser.add_argument(
        "--rank", type=positive, default=8, metavar="N", help="rank of random adapters (default 8)"
    )


def _add_serving(parts: Parts) -> None:
    parser = add_part(
        parts,
        "serving",
        "tokens a second and latencies of a server under a load",
        "Every request is a greedy stream of exactly --max-tokens; equal seeds ask equal requests, "
        "and equal digests mean equal texts.",
    )
    _add_load(parser)
    add = parser.add_argument
    add("--peer", choices=("peft",), help="run the same requests through PEFT's mixed batches too")
    add(
        "--models",
        default="",
        metavar="NAMES",
        help="names to ask for, with commas between (default: the first --adapters, else the base)",
    )
    add(
        "--zipf",
        type=float,
        metavar="S",
        help="draw names by Zipf's law with exponent S, first ones most (default: in turn)",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help="open loop: start R requests a second, whoever has ended (default: closed loop)",
    )
    add(
        "--warmup",
        type=count,
        default=0,
        metavar="N",
        help="requests before the first run that are not measured (default 0)",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="compute threads of --peer peft (default: torch's)",
    )


def _add_churn(parts: Parts) -> None:
    parser = add_part(
        parts,
        "churn",
        "more adapters than slots: hit rates, evictions, and latency while adapters are loaded",
        "Starts ours once a cell; a peer must serve adapters lora-00, lora-01 and so on.",
    )
    add_made(parser)
    add = parser.add_argument
    add(
        "--cells",
        default="8/8,16/8,32/8",
        metavar="A/S[/T],...",
        help="adapters over slots, and how many the CPU cache holds (default twice the slots)",
    )
    add_shared(
        parser,
        {
            "--tp": 1,
            "--peer-url": None,
            "--api-key": "",
            "--requests": 64,
            "--concurrency": 16,
            "--prompt-tokens": 64,
            "--max-tokens": 64,
            "--seed": 0,
            "--runs": 3,
            "--timeout": 300,
        },
    )


def _add_prefix(parts: Parts) -> None:
    parser = add_part(
        parts,
        "prefix",
        "time to the first token behind a long prefix, new and cached",
        "Starts ours; a peer must serve base and lora-00.",
    )
    add_made(parser)
    add = parser.add_argument
    add(
        "--prefix-tokens",
        type=positives,
        default=(256, 1024),
        metavar="N,...",
        help="tokens that two prompts begin with (default 256,1024)",
    )
    add_shared(parser, {"--tp": 1, "--peer-url": None, "--api-key": "", "--max-tokens": 4})
    add("--seed", type=count, default=0, help="of all prompts (default 0)")
    add_shared(parser, {"--runs": 5, "--timeout": 300})
