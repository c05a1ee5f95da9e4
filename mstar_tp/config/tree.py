"""The whole configuration: one frozen tree of sections."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import yaml
from pydantic.fields import FieldInfo

from mstar_tp.config.engine import EngineConfig
from mstar_tp.config.lora import LoraConfig
from mstar_tp.config.section import Fault, Section, literal
from mstar_tp.config.server import ServerConfig

try:  # libyaml's: a hundred thousand adapters take a second instead of six
    from yaml import CSafeDumper as _Dumper
except ImportError:
    from yaml import SafeDumper as _Dumper  # type: ignore[assignment]


class ServeConfig(Section):
    """The configuration of one instance."""

    engine: EngineConfig
    server: ServerConfig = ServerConfig()

    @property
    def base_names(self) -> tuple[str, ...]:
        """The names of the base model; answers carry the first."""
        return self.server.served_model_name or (self.engine.model,)

    def _faults(self) -> Iterator[Fault]:
        adapters = {} if self.engine.lora is None else self.engine.lora.adapters
        for name in self.base_names:
            if name in adapters:
                yield Fault(
                    f"{{}}: {literal(repr(name))} is a name of the base model: rename the adapter",
                    ("engine.lora.adapters",),
                    (name,),
                )

    def digest(self) -> str:
        """A hash of what ranks must agree on, equal on every rank of one instance."""
        payload = json.dumps(self.engine.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    def dump_yaml(self) -> str:
        """The whole tree as YAML, defaults included."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


SECTIONS: dict[str, type[Section]] = {
    "engine": EngineConfig,
    "engine.lora": LoraConfig,
    "server": ServerConfig,
}
"""The sections by their place in the tree."""


def all_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value, with dots, and its field."""
    for prefix, section in SECTIONS.items():
        for name, field in section.model_fields.items():
            if (key := f"{prefix}.{name}") not in SECTIONS:
                yield key, field


def all_keys() -> Iterator[str]:
    """Every key that holds a value, with dots."""
    return (key for key, _ in all_fields())
