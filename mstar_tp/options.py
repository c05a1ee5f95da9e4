"""Command-line flags of everything that takes a serving configuration, and how they become one.

One table for ``mstar-tp serve``, ``frontend``, ``check`` and ``python -m mstar_tp.worker``, so
that the same flags give the same configuration (and digest) everywhere. Flags are named as vLLM's
where they mean the same. No torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from mstar_tp.config import ConfigFindings, ServeConfig, parse_config, read_tree
from mstar_tp.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT_INSTANCE = "default"
"""Of ranks and a frontend that are started by hand; a supervised instance gets a random one."""


class Option(NamedTuple):
    """One flag: its spellings, where its value goes in the configuration, and what help says."""

    flags: tuple[str, ...]
    key: str
    help: str
    value: str = "N"
    """What help calls the value."""
    many: bool = False
    switch: bool = False
    """Takes no value: ``--flag`` turns it on, ``--no-flag`` off."""


OPTIONS: tuple[Option, ...] = (
    Option(
        ("--tensor-parallel-size", "--tp", "-tp"),
        "engine.tensor_parallel_size",
        "ranks that the model is split over (default 1)",
    ),
    Option(
        ("--dtype",),
        "engine.dtype",
        "auto, float32, bfloat16 or float16 (default auto)",
        value="DTYPE",
    ),
    Option(("--device",), "engine.device", "auto, cpu or cuda (default auto)", value="DEVICE"),
    Option(
        ("--max-model-len",),
        "engine.max_model_len",
        "prompt plus output tokens of one request (default: the model's own limit)",
    ),
    Option(("--max-num-seqs",), "engine.max_num_seqs", "rows in one step (default 64)"),
    Option(
        ("--max-num-batched-tokens",),
        "engine.max_num_batched_tokens",
        "tokens in one step; longer prompts are computed in chunks (default: 128 on CPUs, 2048 on "
        "CUDA devices, max-num-seqs if that is more)",
    ),
    Option(
        ("--scheduling-policy",),
        "engine.scheduling_policy",
        "fcfs: by arrival; priority: requests of a lower priority number first (default fcfs)",
        value="POLICY",
    ),
    Option(
        ("--async-scheduling",),
        "engine.async_scheduling",
        "plan each step while the one before it runs (default: on, but for a single CPU rank)",
        switch=True,
    ),
    Option(
        ("--enforce-eager",),
        "engine.enforce_eager",
        "capture no CUDA graphs (default: capture; CPU ranks never do)",
        switch=True,
    ),
    Option(
        ("--graph-rows", "--cudagraph-capture-sizes"),
        "engine.graph_rows",
        "rows of the decode steps that are captured (default: 1, 2, 4 … and max-num-seqs)",
        many=True,
    ),
    Option(
        ("--graph-tokens",),
        "engine.graph_tokens",
        "tokens of the other steps that are captured in pieces (default: 16, 32 … 512)",
        many=True,
    ),
    Option(("--block-size",), "engine.block_size", "tokens in one KV page (default 16)"),
    Option(
        ("--kv-cache-memory-bytes",),
        "engine.kv_cache_memory_bytes",
        "KV pages' bytes on each rank (default: what max-num-seqs full requests need, up to 4 GiB)",
        value="BYTES",
    ),
    Option(
        ("--num-kv-pages", "--num-gpu-blocks-override"),
        "engine.num_kv_pages",
        "KV pages on each rank, instead of a number of bytes",
    ),
    Option(
        ("--attention-backend",),
        "engine.attention_backend",
        "auto, triton, flashinfer or torch (default auto: triton on CUDA devices)",
        value="NAME",
    ),
    Option(
        ("--batch-invariant",),
        "engine.batch_invariant",
        "on CUDA devices, attention and adapters give a row the same bits in any batch (default: "
        "off)",
        switch=True,
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
        value="MODE",
    ),
    Option(("--max-logprobs",), "engine.max_logprobs", "most logprobs of a token (default 20)"),
    Option(
        ("--read-timeout",),
        "engine.read_timeout_s",
        "seconds after which reading an adapter has failed (default 120)",
        value="SECONDS",
    ),
    Option(
        ("--start-timeout",),
        "engine.start_timeout_s",
        "seconds that start-up waits for every rank (default 600)",
        value="SECONDS",
    ),
    Option(
        ("--step-timeout",),
        "engine.step_timeout_s",
        "seconds after which a step that still runs counts as hung (default 300)",
        value="SECONDS",
    ),
    Option(
        ("--record",),
        "engine.record",
        "record what every rank applied for `mstar-tp replay`; rank R writes PATH.rankR",
        value="PATH",
    ),
    Option(
        ("--lora", "--lora-modules"),
        "engine.lora.adapters",
        "name=path of an adapter to serve; repeatable",
        many=True,
        value="NAME=PATH",
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
        value="BYTES",
    ),
    Option(
        ("--lora-root",),
        "engine.lora.roots",
        "folder that runtime loads may read from; repeatable (default: none, so no runtime loads)",
        many=True,
        value="FOLDER",
    ),
    Option(
        ("--lora-exclude",),
        "engine.lora.exclude",
        "regular expression of modules that no adapter may change; slots need no memory for them",
        many=True,
        value="PATTERN",
    ),
    Option(
        ("--served-model-name",),
        "server.served_model_name",
        "names of the base model; answers carry the first (default: the model path)",
        many=True,
        value="NAME",
    ),
    Option(("--host",), "server.host", "address of the API (default 127.0.0.1)", value="ADDRESS"),
    Option(
        ("--port",),
        "server.port",
        "port of the API; 0 takes a free one (default 8000)",
        value="PORT",
    ),
    Option(
        ("--api-key",),
        "server.api_key",
        "key that /v1 requests need; repeatable",
        many=True,
        value="KEY",
    ),
    Option(
        ("--admin-key",),
        "server.admin_key",
        "key that load, unload and debug routes need instead",
        value="KEY",
    ),
    Option(
        ("--max-queue",), "server.max_queue", "requests held before the API says 503 (default 4096)"
    ),
    Option(
        ("--tool-call-parser",),
        "server.tool_call_parser",
        "how the model writes tool calls: hermes, llama3_json, mistral, none, or auto, which goes "
        "by its chat template (default auto)",
        value="FORM",
    ),
    Option(
        ("--shutdown-grace",),
        "server.shutdown_grace_s",
        "seconds that running requests get after SIGTERM (default 30)",
        value="SECONDS",
    ),
    Option(
        ("--max-restarts",),
        "server.max_restarts",
        "times in a row that ranks which died are started again (default 10; 0: never)",
    ),
    Option(
        ("--state-file",),
        "server.state_file",
        "file that keeps adapters loaded and unloaded at run time over a restart of the server",
        value="PATH",
    ),
)


class ModelParser(argparse.ArgumentParser):
    """Takes MODEL wherever it stands: also behind a flag that takes several values, which would
    swallow it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self._model_first(given), namespace)

    def _model_first(self, args: list[str]) -> list[str]:
        """``args``, with MODEL in front where a flag of several values would take it for its own:
        what stands last behind such a flag, or what is no NAME=PATH where those are wanted.
        """
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        taking: argparse.Action | None = None
        left, last, sure = 0, -1, -1
        for at, arg in enumerate(args):
            flag, attached, _ = arg.partition("=")
            if flag in flags:
                action = flags[flag]
                taking = action if action.nargs == "+" and not attached else None
                left = 1 if action.nargs in (None, "+") and not attached else 0
            elif left:
                left -= 1
            elif taking is not None:
                if taking.metavar != "NAME=PATH":
                    last = at
                elif not attached:
                    sure = at
            elif not arg.startswith("-"):
                return args  # it stands for itself
        at = sure if sure >= 0 else last
        return args if at < 0 else [args[at], *args[:at], *args[at + 1 :]]


class _Given(argparse.Action):
    """Stores a value, or adds several, and keeps the flag as it was spelled."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == "+":
            values = [*(getattr(namespace, self.dest) or ()), *values]
        setattr(namespace, self.dest, values)
        namespace.spelled = {**getattr(namespace, "spelled", {}), self.dest: option_string}


class _Switch(argparse.BooleanOptionalAction):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.spelled = {**getattr(namespace, "spelled", {}), self.dest: option_string}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The model (or a YAML file) and every flag of ``OPTIONS``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of the base model, or a serving configuration (a .yaml file); flags given "
        "beside a file override it",
    )
    for option in OPTIONS:
        if option.switch:
            parser.add_argument(*option.flags, dest=option.key, action=_Switch, help=option.help)
            continue
        parser.add_argument(
            *option.flags,
            dest=option.key,
            nargs="+" if option.many else None,
            action=_Given,
            metavar=option.value,
            help=option.help,
        )


def config_from_args(args: argparse.Namespace) -> ServeConfig:
    """The configuration that the arguments describe.

    Raises:
        ConfigError: naming every key that is unknown, missing or out of range.
    """
    config, problems, _ = parse_args(args)
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def parse_args(args: argparse.Namespace) -> ConfigFindings:
    """The configuration that the arguments describe, and all that is wrong with it.

    Raises:
        ConfigError: there is no such folder or file, or the file holds no keys at all.
    """
    model: str = args.model
    problems: tuple[str, ...] = ()
    if model.endswith((".yaml", ".yml")):
        tree, problems = read_tree(model)
        source = model
    else:
        if not os.path.isdir(model):
            raise ConfigError(f"{model}: no such folder: name a model's folder or a .yaml file")
        tree, source = {"engine": {"model": model}}, COMMAND_LINE
    for option in OPTIONS:
        value = getattr(args, option.key)
        if value is None:
            continue
        if option.value == "NAME=PATH":
            value, wrong = _adapters(value, args.spelled[option.key])
            problems += wrong
        _put(tree, option.key, value)
    found = parse_config(tree, source=source, flags=getattr(args, "spelled", {}))
    return found._replace(problems=problems + found.problems)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        # What a file has in a section's place is wrong anyhow, but not because of this flag.
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[name] = value


def _adapters(values: Iterable[str], flag: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Adapters by name, and what is wrong with the others."""
    adapters: dict[str, str] = {}
    problems = []
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or not name or not path:
            problems.append(f"{flag}: got {value!r}, wanted NAME=PATH")
        elif name in adapters:
            problems.append(
                f"{flag}: {name!r} names two adapters, {adapters[name]} and {path}: give one of "
                "them another name"
            )
        else:
            adapters[name] = path
    return adapters, tuple(problems)
