"""Command-line flags of everything that takes a serving configuration, and how they become one.

``mstar-tp serve``, ``frontend``, ``check`` and ``python -m mstar_tp.worker`` all take the flags of
``config.flags``, so that the same flags give the same configuration (and digest) everywhere. No
torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

from mstar_tp.common.errors import ConfigError
from mstar_tp.config import ConfigFindings, ServeConfig, parse_config, read_tree
from mstar_tp.config.flags import OPTIONS
from mstar_tp.config.section import GROUPS

COMMAND_LINE = "command line"
DEFAULT_INSTANCE = "default"
"""The instance of ranks and a frontend started by hand; a supervised one gets a random name."""


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
    """Add the model (or a YAML file) and every flag of ``OPTIONS``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of the base model, or a serving configuration (a .yaml file); flags given "
        "beside a file override it",
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for option in OPTIONS:
        add = groups[option.group].add_argument
        if option.switch:
            add(*option.flags, dest=option.key, action=_Switch, help=option.help)
            continue
        add(
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
    """The limits of one adapter, or of several by name, and the problems of their spelling.

    The configuration checks the values themselves.
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
