"""Validation of a plain tree, which finds everything that is wrong at once.

Serving raises what it finds; checking reports it and goes on with the rest.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from mstar_tp.common.errors import ConfigError
from mstar_tp.config.flags import OPTIONS
from mstar_tp.config.limits import LimitsConfig
from mstar_tp.config.section import Fault, FaultsError, shown
from mstar_tp.config.tree import ServeConfig, all_keys


class ConfigFindings(NamedTuple):
    """A configuration and what is wrong with it.

    With problems, ``config`` holds what is right: the keys at fault have their defaults, and a
    model that is not named is "".
    """

    config: ServeConfig | None
    problems: tuple[str, ...]
    faulty: frozenset[str] = frozenset()
    """Keys that have not the value they were given."""


def build_config(
    tree: dict[str, Any], *, source: str, flags: Mapping[str, str] | None = None
) -> ServeConfig:
    """A validated config from a plain tree; see ``parse_config``.

    Raises:
        ConfigError: naming every key that is unknown, missing or out of range, one a line.
    """
    config, problems, _ = parse_config(tree, source=source, flags=flags)
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def parse_config(
    tree: dict[str, Any], *, source: str, flags: Mapping[str, str] | None = None
) -> ConfigFindings:
    """Validate a plain tree, whole.

    ``source`` names the file or "command line" in problems, one sentence each; ``flags``: key (with
    dots) -> the flag that it was given by, which is named instead.
    """
    tree, names = copy.deepcopy(tree), _Names(source, flags or {})
    problems: dict[str, None] = {}
    faulty: set[str] = set()
    for _ in range(_MAX_PASSES):
        try:
            config = ServeConfig.model_validate(tree)
            return ConfigFindings(config, tuple(problems), frozenset(faulty))
        except ValidationError as error:
            # What hides behind a bad key comes out once that key is gone.
            for e in error.errors():
                for path, text in _sentences(e, names):
                    problems[text] = None
                    faulty.add(".".join(map(str, path)))
                    _forget(tree, path)
    return ConfigFindings(None, tuple(problems), frozenset(faulty))


_MAX_PASSES = 20
_NO_MODEL: dict[tuple[str, ...], Any] = {("engine",): {"model": ""}, ("engine", "model"): ""}


class _Names(NamedTuple):
    """The names by which a person knows keys: a flag, or the file and the key."""

    source: str
    flags: Mapping[str, str]

    def key(self, key: str) -> str:
        """The key's name at the start of a sentence."""
        return self.flags.get(key) or f"{self.source}: {key}"

    def fault(self, section: str, fault: Fault) -> str:
        keys = [f"{section}.{key}" if section else key for key in fault.keys]
        named = [self.flags.get(full, key) for full, key in zip(keys, fault.keys, strict=True)]
        text = fault.text.format(*named)
        return text if keys[0] in self.flags else f"{self.source}: {section or 'config'}: {text}"


def _sentences(error: Any, names: _Names) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the path of each key at fault and what is wrong with it."""
    path, kind, message = error["loc"], error["type"], error["msg"]
    key = ".".join(str(part) for part in path if part != "[key]") or "config"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FaultsError):
        for fault in cause.faults:
            section = ".".join(map(str, path))
            yield (*path, *fault.path), names.fault(section, fault)
    elif kind == "extra_forbidden":
        yield path, f"{names.key(key)} is no setting{_meant(path)}"
    elif kind == "missing":
        name = "engine.model" if path == ("engine",) else key
        yield path, f"{names.key(name)} is missing"
    elif cause is not None:
        yield path, f"{names.key(key)}: {cause}"
    elif message.startswith("Input should be "):
        wanted = message.removeprefix("Input should be ").partition(", unable to parse")[0]
        yield path, f"{names.key(key)}: got {shown(error['input'])}, wanted {wanted}"
    else:
        yield path, f"{names.key(key)}: {message} (got {shown(error['input'])})"


def _forget(tree: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Take the key at fault out of the tree; where it lies in a list, the list."""
    if path in _NO_MODEL and (len(path) == 1 or path[-1] not in tree[path[0]]):
        (tree if len(path) == 1 else tree["engine"])[path[-1]] = _NO_MODEL[path]
        return
    holder, key, here = tree, None, tree
    for part in path:
        if not isinstance(here, dict) or part not in here:
            break
        holder, key, here = here, part, here[part]
    if key is not None:
        del holder[key]


def _meant(path: tuple[Any, ...]) -> str:
    """The key that an unknown one is close to: one of its neighbours, or one of another section."""
    leaf = str(path[-1]).lstrip("-").replace("-", "_").lower()
    home = "".join(f"{part}." for part in path[:-1])
    if _holds_limits(path[:-1]):
        return _near(leaf, home, list(LimitsConfig.model_fields))
    keys = sorted(all_keys(), key=lambda key: not key.startswith(home))
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(keys)}
    by_leaf |= {short: key for short, key in _SHORT.items() if short not in by_leaf}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    if close:
        return f": did you mean {by_leaf[close[0]]}?"
    there = sorted(key.removeprefix(home) for key in keys if key.startswith(home))
    whole = [name for name in there if "." not in name]
    return f": there are {', '.join(whole or ['engine', 'server'])}"


def _near(leaf: str, home: str, names: list[str]) -> str:
    close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.7)
    return f": did you mean {home}{close[0]}?" if close else f": there are {', '.join(names)}"


def _holds_limits(section: tuple[Any, ...]) -> bool:
    """True where ``section`` is the limits of adapters, or of one."""
    return section in _LIMITS or section[:-1] == ("engine", "lora", "limits")


_LIMITS = (("engine", "lora", "default_limits"), ("engine", "lora", "base_limits"))
_SHORT = {
    flag.lstrip("-").replace("-", "_"): option.key for option in OPTIONS for flag in option.flags
}
"""The name of each flag as a key would be spelled -> the key."""
