"""Configurations in YAML files, whose keys are those of the tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mstar_tp.common.errors import ConfigError
from mstar_tp.config.parse import parse_config
from mstar_tp.config.tree import ServeConfig

try:  # libyaml's: a hundred thousand adapters take a second instead of six
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]


class _Loader(_SafeLoader):
    """YAML's own loader, which also remembers the keys that stand twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.twice: list[str] = []

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in seen:
                    self.twice.append(
                        f"{key.value!r} stands twice, in lines {seen[key.value]} and {line}: "
                        "remove one"
                    )
                seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


def read_tree(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plain tree in a YAML file, and what is wrong with it.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else than keys.
    """
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        try:
            tree = loader.get_single_data()
        finally:
            loader.dispose()
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        text = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {text}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wanted a mapping with the keys engine and server")
    return tree, tuple(f"{path}: {text}" for text in loader.twice)


def load_config(path: str | Path) -> ServeConfig:
    """Read a YAML serving config.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds bad keys, each of them named.
    """
    tree, twice = read_tree(path)
    config, problems, _ = parse_config(tree, source=str(path))
    if twice or problems or config is None:
        raise ConfigError("\n".join(twice + problems))
    return config
