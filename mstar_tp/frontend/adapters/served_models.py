"""The names that clients may ask for: the base model's, and those of the adapters served now.

A name is resolved once a request, to an adapter key; a later unload or reload of the name changes
nothing for that request. The event loop's thread owns the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mstar_tp.common.errors import RequestError
from mstar_tp.config import adapter_name_fault
from mstar_tp.frontend.api.api_errors import no_such_model
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""The files of an adapter's folder that this process reads: its tokenizer and chat template."""


@dataclass(slots=True, kw_only=True)
class ServedAdapter:
    """One generation of an adapter, served or unloaded while requests name it."""

    key: AdapterKey
    path: str
    created: int = field(default_factory=lambda: int(time.time()))
    digest: str | None = None
    on_demand: bool = False
    """True where a request asked for it, and not an operator."""
    limits: AdapterLimits = NO_LIMITS

    @property
    def configured(self) -> bool:
        """True where the configuration names it."""
        return self.key.generation == FIRST_GENERATION


class ServedModels:
    """The base model's names and the served adapters, by name.

    Adapters that were unloaded while requests name them are kept beside those; with these requests
    they outlive the ranks.
    """

    def __init__(
        self,
        base_names: tuple[str, ...],
        root: str,
        adapters: Mapping[str, str],
        configured_limits: Callable[[str | None], AdapterLimits] = lambda name: NO_LIMITS,
    ) -> None:
        """``root`` is the base model's folder; ``adapters``, name -> folder, are served at first.

        ``configured_limits`` gives the limits of an adapter that was given no others, None standing
        for the base model.
        """
        self.configured_limits = configured_limits
        self.base_names = base_names
        self.root = root
        self.created = int(time.time())
        self.configured = tuple(AdapterKey(name, FIRST_GENERATION) for name in adapters)
        """The adapters that ranks serve when they are started for the first time."""
        self._adapters = {
            key.name: ServedAdapter(
                key=key, path=adapters[key.name], limits=configured_limits(key.name)
            )
            for key in self.configured
        }
        self._on_demand: dict[str, None] = {}
        self._retired: dict[AdapterKey, ServedAdapter] = {}
        self._generation = FIRST_GENERATION

    def resolve(self, name: str) -> AdapterKey | None:
        """Return an adapter's key, or None for the base.

        Raises:
            ApiError: 404, nothing of that name is served.
        """
        if name in self.base_names:
            return None
        adapter = self._adapters.get(name)
        if adapter is None:
            raise no_such_model(name)
        return adapter.key

    def get(self, name: str) -> ServedAdapter | None:
        """Return the adapter served as ``name``, if there is one."""
        return self._adapters.get(name)

    def of_key(self, key: AdapterKey) -> ServedAdapter | None:
        """Return the adapter of exactly this key, also an unloaded one that requests name."""
        found = self._retired.get(key) or self._adapters.get(key.name)
        return found if found is not None and found.key == key else None

    def knows(self, name: str) -> bool:
        """Return whether an adapter of this name is served, or unloaded and still requested."""
        return name in self._adapters or any(key.name == name for key in self._retired)

    def adapters(self) -> Iterable[ServedAdapter]:
        """Return the served adapters, by name, oldest first."""
        return self._adapters.values()

    @property
    def num_adapters(self) -> int:
        return len(self._adapters)

    @property
    def num_on_demand(self) -> int:
        """The number of served adapters that requests asked for."""
        return len(self._on_demand)

    def on_demand(self) -> list[ServedAdapter]:
        """Return the served adapters that requests asked for."""
        return [self._adapters[name] for name in self._on_demand]

    def known(self) -> list[ServedAdapter]:
        """Return all adapters that requests may still name, of each name the older ones first."""
        return [*self._retired.values(), *self._adapters.values()]

    def next_key(self, name: str) -> AdapterKey:
        """Return a key for ``name`` that was never used before."""
        self._generation += 1
        return AdapterKey(name, self._generation)

    def limits_of(self, key: AdapterKey | None) -> AdapterLimits:
        """Return an adapter's limits; None stands for the base model."""
        adapter = None if key is None else self.of_key(key)
        if adapter is not None:
            return adapter.limits
        return self.configured_limits(None if key is None else key.name)

    def add(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        *,
        on_demand: bool = False,
        limits: AdapterLimits | None = None,
    ) -> None:
        """Serve ``key`` to new requests on its name; the adapter there before is retired.

        ``limits`` are the configured ones unless given.
        """
        if key.name in self._adapters:
            self.remove(key.name)
        if limits is None:
            limits = self.configured_limits(key.name)
        self._adapters[key.name] = ServedAdapter(
            key=key, path=path, digest=digest, on_demand=on_demand, limits=limits
        )
        if on_demand:
            self._on_demand[key.name] = None

    def remove(self, name: str) -> AdapterKey:
        """Stop serving ``name`` to new requests; its record stays until ``forget``.

        Raises:
            KeyError: no adapter of that name is served.
        """
        adapter = self._adapters.pop(name)
        self._on_demand.pop(name, None)
        adapter.limits = msgspec.structs.replace(adapter.limits, pinned=False)
        self._retired[adapter.key] = adapter
        return adapter.key

    def forget(self, key: AdapterKey) -> None:
        """Drop the unloaded ``key``, which no request names. No-op when it is served or unknown."""
        self._retired.pop(key, None)

    def set_digest(self, key: AdapterKey, digest: str) -> None:
        """Note the digest of an adapter's weights, once the ranks have read them."""
        adapter = self.of_key(key)
        if adapter is not None:
            adapter.digest = digest


def check_adapter_name(name: str, base_names: tuple[str, ...]) -> None:
    """Raises RequestError: ``name`` is none that an adapter can have."""
    if name in base_names:
        raise RequestError(
            f"lora_name: '{name}' is a name of the base model: choose another", param="lora_name"
        )
    fault = adapter_name_fault(name)
    if fault is not None:
        raise RequestError(f"lora_name: {fault}", param="lora_name")


class AdapterRoots:
    """The folders that loads at run time may read from.

    A load whose folder or files lead out of them when it is asked for reaches no rank.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)

    def resolve(self, path: str) -> str:
        """Return ``path`` with every symlink and ``..`` resolved. Lists the folder.

        Raises:
            RequestError: it, or a file there that a rank would open, leads outside the roots, or
                there are none.
        """
        if not self._roots:
            raise RequestError(
                "lora_path: this server loads no adapters while it runs: start it with --lora-root",
                param="lora_path",
            )
        if not path or "\0" in path:
            raise RequestError(
                "lora_path: must be the path of a folder or a file", param="lora_path"
            )
        real = Path(os.path.realpath(path))
        if not _is_text(str(real)):
            raise RequestError(
                "lora_path: leads to a folder whose name is not UTF-8: rename it",
                param="lora_path",
            )
        if not self._allows(real):
            raise RequestError(
                "lora_path: leads outside the folders that --lora-root allows: name a folder in "
                "one of those by its whole path; a relative path begins in the folder that the "
                "server was started in",
                param="lora_path",
            )
        for name in _adapter_files(real):
            if not self._allows(Path(os.path.realpath(real / name))):
                raise RequestError(
                    f"lora_path: its {name} leads outside the folders that --lora-root allows: "
                    "put the file itself there",
                    param="lora_path",
                )
        return str(real)

    def _allows(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._roots)


def _is_text(path: str) -> bool:
    """Return whether messages to ranks and the state file can hold ``path``."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _adapter_files(folder: Path) -> list[str]:
    """Return the names in ``folder`` of files that belong to an adapter, sorted."""
    try:
        names = set(os.listdir(folder))
    except OSError:  # none, or not to be listed: the ranks say so; its files may still be there
        names = set()
    endings = (".safetensors", ".index.json")
    found = {n for n in names if n.startswith("adapter_model") or n.endswith(endings)}
    wanted = {"adapter_config.json", "adapter_model.safetensors", *TEXT_FILES}
    return sorted(found | wanted)
