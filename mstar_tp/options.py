"""Command-line flags of everything that takes a serving configuration, and how they become one.

One table for ``mstar-tp serve``, ``mstar-tp frontend`` and ``python -m mstar_tp.worker``, so that
the same flags give the same
configuration (and digest) everywhere. Flags are named as vLLM's where they mean the same. No torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mstar_tp.config import ServeConfig, build_config, load_config
from mstar_tp.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT_INSTANCE = "default"
"""Of ranks and a frontend that are started by hand; a supervised instance gets a random one."""


class Option(NamedTuple):
    """One flag: its spellings, where its value goes in the configuration, and what help says."""

    flags: tuple[str, ...]
    key: str
    help: str
    many: bool = False
    switch: bool = False
    """Takes no value: ``--flag`` turns it on, ``--no-flag`` off."""


OPTIONS: tuple[Option, ...] = (
    Option(
        ("--tensor-parallel-size", "--tp", "-tp"),
        "engine.tensor_parallel_size",
        "ranks that the model is split over (default 1)",
    ),
    Option(("--dtype",), "engine.dtype", "auto, float32, bfloat16 or float16 (default auto)"),
    Option(("--device",), "engine.device", "auto, cpu or cuda (default auto)"),
    Option(
        ("--max-model-len",),
        "engine.max_model_len",
        "prompt plus output tokens of one request (default: the model's own limit)",
    ),
    Option(("--max-num-seqs",), "engine.max_num_seqs", "rows in one step (default 64)"),
    Option(
        ("--max-num-batched-tokens",),
        "engine.max_num_batched_tokens",
        "tokens in one step; longer prompts are computed in chunks (default 2048)",
    ),
    Option(
        ("--async-scheduling",),
        "engine.async_scheduling",
        "plan each step while the one before it runs (default: on, but for a single CPU rank)",
        switch=True,
    ),
    Option(("--block-size",), "engine.block_size", "tokens in one KV page (default 16)"),
    Option(
        ("--kv-cache-memory-bytes",),
        "engine.kv_cache_memory_bytes",
        "KV pages' bytes on each rank (default: what max-num-seqs full requests need, up to 4 GiB)",
    ),
    Option(
        ("--num-kv-pages", "--num-gpu-blocks-override"),
        "engine.num_kv_pages",
        "KV pages on each rank, instead of a number of bytes",
    ),
    Option(
        ("--threads",),
        "engine.threads",
        "compute threads of a CPU rank (default: its share of the cores, 1 for a small model)",
    ),
    Option(
        ("--logprobs-mode",),
        "engine.logprobs_mode",
        "raw_logprobs or raw_logits: what logprobs report (default raw_logprobs)",
    ),
    Option(("--max-logprobs",), "engine.max_logprobs", "most alternatives a token (default 20)"),
    Option(
        ("--read-timeout",),
        "engine.read_timeout_s",
        "seconds after which reading an adapter has failed (default 120)",
    ),
    Option(
        ("--start-timeout",),
        "engine.start_timeout_s",
        "seconds that start-up waits for every rank (default 600)",
    ),
    Option(
        ("--record",),
        "engine.record",
        "record what every rank applied for `mstar-tp replay`; rank R writes VALUE.rankR",
    ),
    Option(
        ("--lora", "--lora-modules"),
        "engine.lora.adapters",
        "name=path of an adapter to serve; repeatable",
        many=True,
    ),
    Option(("--max-loras",), "engine.lora.max_loras", "distinct adapters in one batch (default 8)"),
    Option(("--max-lora-rank",), "engine.lora.max_lora_rank", "highest adapter rank (default 16)"),
    Option(
        ("--max-lora-saved-rows",),
        "engine.lora.max_lora_saved_rows",
        "vocabulary rows that an adapter may replace, held in every slot (default 64)",
    ),
    Option(
        ("--max-cpu-loras",),
        "engine.lora.max_cpu_loras",
        "adapters in each rank's host memory (default: twice max-loras)",
    ),
    Option(
        ("--max-cpu-lora-bytes",),
        "engine.lora.max_cpu_lora_bytes",
        "bytes of adapters in each rank's host memory, instead of a number of adapters",
    ),
    Option(
        ("--lora-root",),
        "engine.lora.roots",
        "folder that runtime loads may read from; repeatable (default: none, so no runtime loads)",
        many=True,
    ),
    Option(
        ("--served-model-name",),
        "server.served_model_name",
        "names of the base model; answers carry the first (default: the model path)",
        many=True,
    ),
    Option(("--host",), "server.host", "address of the API (default 127.0.0.1)"),
    Option(("--port",), "server.port", "port of the API; 0 takes a free one (default 8000)"),
    Option(("--api-key",), "server.api_key", "key that /v1 requests need; repeatable", many=True),
    Option(
        ("--admin-key",), "server.admin_key", "key that load, unload and debug routes need instead"
    ),
    Option(
        ("--max-queue",), "server.max_queue", "requests held before the API says 503 (default 4096)"
    ),
    Option(
        ("--shutdown-grace",),
        "server.shutdown_grace_s",
        "seconds that running requests get after SIGTERM (default 30)",
    ),
)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The model (or a YAML file) and every flag of ``OPTIONS``."""
    parser.add_argument(
        "model",
        help="folder of the base model, or a serving configuration (a .yaml file); flags given "
        "beside a file override it",
    )
    for option in OPTIONS:
        if option.switch:
            parser.add_argument(
                *option.flags,
                dest=option.key,
                action=argparse.BooleanOptionalAction,
                help=option.help,
            )
            continue
        parser.add_argument(
            *option.flags,
            dest=option.key,
            nargs="+" if option.many else None,
            action="extend" if option.many else "store",
            metavar="NAME=PATH" if option.key.endswith("adapters") else "VALUE",
            help=option.help,
        )


def config_from_args(args: argparse.Namespace) -> ServeConfig:
    """The configuration that the arguments describe.

    Raises:
        ConfigError: naming every key that is unknown, missing or out of range.
    """
    model: str = args.model
    if model.endswith((".yaml", ".yml")):
        tree = load_config(model).model_dump(exclude_unset=True)
        source = model
    else:
        if not Path(model).is_dir():
            raise ConfigError(f"{model}: no such folder: name a model's folder or a .yaml file")
        tree, source = {"engine": {"model": model}}, COMMAND_LINE
    for option in OPTIONS:
        value = getattr(args, option.key)
        if value is not None:
            _put(tree, option.key, _adapters(value) if option.key.endswith("adapters") else value)
    return build_config(tree, source=source)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
    tree[name] = value


def _adapters(values: Sequence[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"--lora: got {value!r}, wanted name=path")
        if name in adapters:
            raise ConfigError(f"--lora: {name!r} is given twice")
        adapters[name] = path
    return adapters
