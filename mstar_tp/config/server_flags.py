"""Command-line flags of everything that takes a serving configuration, and how they become one.

``mstar-tp serve``, ``frontend``, ``check`` and ``python -m mstar_tp.worker`` all take the flags of
``config.flags``, so that the same flags give the same configuration (and digest) everywhere. No
torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mstar_tp.common.errors import ConfigError
from mstar_tp.config import ConfigFindings, ServeConfig, parse_config, read_tree
from mstar_tp.config.flags import OPTIONS

COMMAND_LINE = "command line"
DEFAULT_INSTANCE = "default"
"""Of ranks and a frontend that are started by hand; a supervised instance gets a random one."""

PEERS_FLAGS = {
    "--enable-lora": "leave it out: LoRA is on where there is an adapter or a root",
    "--gpu-memory-utilization": "KV pages are asked for with --kv-cache-memory-bytes",
    "--enable-auto-tool-choice": "leave it out: --tool-call-parser alone says how calls are read",
    "--enable-chunked-prefill": "leave it out: prompts are always computed in chunks",
    "--fully-sharded-loras": "leave it out: both factors are sharded as their layer is",
    "--lora-dtype": "leave it out: adapters are kept in the model's dtype",
    "--lora-target-modules": "--lora-exclude says what no adapter may change",
    "--lora-paths": "name adapters with --lora",
    "--max-loras-per-batch": "here it is --max-loras",
    "--chat-template": "leave it out: a template is read from the model's folder, or an adapter's",
    "--disable-log-requests": "leave it out: requests are logged with --enable-log-requests alone",
    "--disable-log-stats": "leave it out: GET /metrics has what it would log",
    "--trust-remote-code": "leave it out: no code is read from a model's folder",
    "--quantization": "quantised weights are not served",
    "--kv-cache-dtype": "quantised caches are not served",
    "--speculative-config": "speculative decoding is not served",
    "--pipeline-parallel-size": "only tensor parallelism is served: --tensor-parallel-size",
    "--data-parallel-size": "start several instances: launch/ray_serve.py routes between them",
    "--tokenizer": "leave it out: the tokenizer is the model folder's, or an adapter's",
    "--load-format": "leave it out: weights are safetensors",
    "--seed": "leave it out: a request's `seed` says it",
    "--config": "name the .yaml file in MODEL's place",
}
"""Flags of vLLM and SGLang that are none here, and what to do instead: the usual ones."""


class ClearParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one sentence, and where help is."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(self._unknown(extras))
        return parsed, extras

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = f"{missing} is missing: {self._wanted(missing)}"
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")

    def _unknown(self, extras: Sequence[str]) -> str:
        flag = next((extra for extra in extras if extra.startswith("-")), None)
        if flag is None:
            return f"{extras[0]!r} is one word too many for `{self.prog}`"
        flag = flag.partition("=")[0]
        if (instead := PEERS_FLAGS.get(flag)) is not None:
            return f"{flag} is no flag of `{self.prog}`: {instead}"
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        meant = f": did you mean {close[0]}?" if close else ""
        return f"{flag} is no flag of `{self.prog}`{meant}"

    def _wanted(self, missing: str) -> str:
        """What the first argument of those that are missing is."""
        first = missing.partition(", ")[0]
        for action in self._actions:
            if first in (action.metavar, "/".join(action.option_strings)):
                if action.choices:
                    return f"it is one of {', '.join(action.choices)}"
                return action.help or "give it"
        return "give it"


class ModelParser(ClearParser):
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
        elif option.value.endswith("LIMITS"):
            value, wrong = _limits(value, args.spelled[option.key])
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


def _limits(value: str | Iterable[str], flag: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What an adapter may take, or what several may by name; and what is no such thing. What the
    values themselves may be is the configuration's to say.
    """
    if isinstance(value, str):
        return _settings(value, flag)
    limits: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    for one in value:
        name, separator, text = one.partition("=")
        if not separator or not name or not text:
            problems += (f"{flag}: got {one!r}, wanted NAME=pinned,weight=W,max_rows=N",)
        elif name in limits:
            problems += (f"{flag}: {name!r} stands twice: give its limits at once",)
        else:
            limits[name], wrong = _settings(text, flag)
            problems += wrong
    return limits, problems


def _settings(text: str, flag: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    settings: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    for part in text.split(","):
        key, separator, value = part.partition("=")
        if key == "pinned" and not separator:
            settings[key] = True
        elif key and value:
            settings[key] = value
        else:
            problems += (f"{flag}: got {part!r} in {text!r}, wanted pinned or KEY=NUMBER",)
    return settings, problems
