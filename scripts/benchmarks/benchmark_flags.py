"""The flags of ``scripts/bench.py`` and its parts. Imports no torch until a part runs."""

from __future__ import annotations

from typing import Any

from mstar_tp.bench.bench_flags import SHARED, Parts, add_made, add_part, add_shared
from mstar_tp.config.parsers import ClearParser, count, numbers, positive, positives

DESCRIPTION = (
    "Measure kernels, steps and scale of this build on this machine. Prints a table with the "
    "machine, the versions and the command; --json keeps every figure. Ratios are of medians, "
    "taken in turn."
)

TABLE: dict[str, dict[str, Any]] = {
    **SHARED,
    "--tp": {"type": positives, "metavar": "N,...", "help": "ranks"},
    "--rows": {"type": positives, "metavar": "N,...", "help": "rows of a step"},
    "--adapters": {"type": numbers, "metavar": "N,...", "help": "adapters among the rows"},
    "--tokens": {"type": positive, "metavar": "N", "help": "steps a run"},
    "--dtype": {
        "choices": ("auto", "float32", "bfloat16", "float16"),
        "help": "of weights and activations; auto: the model's own",
    },
    "--device": {
        "choices": ("auto", "cpu", "cuda"),
        "help": "where to compute; auto: a GPU where torch sees one",
    },
}
"""The arguments that several parts take, without their defaults."""


def benchmark_parser() -> ClearParser:
    """The parser of ``scripts/bench.py``."""
    parser = ClearParser(prog="bench.py", description=DESCRIPTION, allow_abbrev=False)
    parts = parser.add_subparsers(required=True, metavar="PART", parser_class=ClearParser)
    _add_kernels(parts)
    _add_step(parts)
    _add_scale(parts)
    return parser


def _add_kernels(parts: Parts) -> None:
    parser = add_part(
        parts,
        "kernels",
        "each operation of a step against a measured copy and GEMM ceiling",
        "Beside each stands the same in torch, PEFT, vLLM or SGLang, where those can be imported.",
        package="benchmarks",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="take the sizes of this model's config.json")
    add(
        "--size",
        choices=("nano", "tiny", "small", "large"),
        default="small",
        help="sizes of 0.3, 4, 387 or 8,000 million parameters (default %(default)s)",
    )
    add_shared(parser, table=TABLE, defaults={"--dtype": "auto", "--device": "auto"})
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="compute threads of this process (default: torch's)",
    )
    add_shared(parser, table=TABLE, defaults={"--rows": "1,8,64,512", "--adapters": "1,8"})
    add("--rank", type=positive, default=16, metavar="N", help="rank of adapters (default 16)")
    add(
        "--context",
        type=positive,
        default=512,
        metavar="N",
        help="tokens that a decoding row attends to (default 512)",
    )
    add(
        "--tp",
        type=positives,
        default=(2,),
        metavar="N,...",
        help="ranks of collectives (default 2)",
    )
    add(
        "--repeats",
        type=positive,
        default=15,
        metavar="N",
        help="times that each is timed; medians are shown (default 15)",
    )
    add(
        "--only",
        default="",
        metavar="KIND,...",
        help="kinds of operations: gemm, lora, operator, attention, norm, silu, rotation, "
        "collectives (default: all)",
    )


def _add_step(parts: Parts) -> None:
    parser = add_part(
        parts,
        "step",
        "phases of a decode step of real ranks, without HTTP",
        "One line for each number of ranks, rows and adapters.",
        package="benchmarks",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a model's folder; default: a built-in model")
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="an adapter to use; repeatable (default: random ones)",
    )
    add_made(parser)
    add_shared(
        parser,
        table=TABLE,
        defaults={
            "--tp": "1",
            "--rows": "1,8",
            "--adapters": "0,8",
            "--prompt-tokens": 32,
            "--tokens": 100,
            "--runs": 3,
        },
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="compute threads of each rank, and of --peer peft",
    )
    add_shared(parser, table=TABLE, defaults={"--dtype": "auto", "--device": "auto"})
    add(
        "--collectives",
        choices=("auto", "gloo"),
        default="auto",
        help="gloo: CPU ranks of one machine share no memory",
    )
    add("--peer", choices=("peft",), help="time PEFT's mixed batches of the same rows too")


def _add_scale(parts: Parts) -> None:
    parser = add_part(
        parts,
        "scale",
        "thousands of registered adapters: step, admit, memory, start and loads at run time",
        "A line for each number of registered adapters, slots and ranks, held against the fewest "
        "adapters, which run in turn with the others.",
        package="benchmarks",
    )
    add_made(parser)
    add = parser.add_argument
    add(
        "--registered",
        type=positives,
        default=(100, 10_000, 100_000),
        metavar="N,...",
        help="registered adapters (default 100,10000,100000)",
    )
    add("--slots", type=positives, default=(8,), metavar="N,...", help="device slots (default 8)")
    add_shared(parser, table=TABLE, defaults={"--tp": "1"})
    add(
        "--rows",
        type=positive,
        default=8,
        metavar="N",
        help="rows of a step, on as many adapters (default 8)",
    )
    add_shared(parser, table=TABLE, defaults={"--tokens": 60, "--runs": 5})
    add("--unlike", action="store_true", help="no header stands twice: every check is a full one")
    add(
        "--folders",
        type=positive,
        default=1000,
        metavar="N",
        help="adapter folders that are made; names past so many share them (default 1000)",
    )
    add(
        "--loads",
        type=count,
        default=1000,
        metavar="N",
        help="adapters loaded at run time (default 1000)",
    )
    add(
        "--clients",
        type=positive,
        default=16,
        metavar="N",
        help="clients that load at once (default 16)",
    )
    add("--peer-url", metavar="URL", help="a second server: the same loads at run time")
