"""The adapters loaded and unloaded at run time, in a file that the server's next start reads.

The event loop owns what is to be written; one thread at a time writes it, whole, beside the file
and then in its place: whoever reads sees one state or the next, also after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from mstar_tp.common.errors import ConfigError, RequestError
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels, check_adapter_name
from mstar_tp.wire.adapter_limits import AdapterLimits

logger = logging.getLogger(__name__)

FORMAT = 1


class SavedAdapter(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One adapter that was loaded at run time; ``digest`` is there once its weights were read.

    An adapter that was loaded ``on_demand`` is served with whatever weights are there.
    """

    name: str
    path: str
    digest: str | None = None
    on_demand: bool = False
    limits: AdapterLimits | None = None
    """Its limits, where they are not those of the configuration."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that differs from the configuration."""

    format: int = FORMAT
    loaded: tuple[SavedAdapter, ...] = ()
    unloaded: tuple[str, ...] = ()
    """The configured adapters that are not served any more."""


class _AnyState(msgspec.Struct, frozen=True):
    """The part that files of every version have."""

    format: int


class StateFile:
    """The file at ``path``; with None nothing is kept. The event loop's thread."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._changes = 0
        self._written = 0
        self._writing: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def restore(
        self, served: ServedModels, roots: AdapterRoots, *, on_demand: bool = False
    ) -> None:
        """Serve the adapters of the file, those loaded on demand only where that is still on.

        Lists folders: called before the loop serves anybody.

        Raises:
            ConfigError: the file cannot be read, is no state of this version, or could not be
                written.
        """
        if self._path is None:
            return
        folder = self._path.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"server.state_file: {self._path} could not be written: {folder} is no folder that "
                "files can be made in"
            )
        try:
            state = _decode(self._path.read_bytes(), self._path)
        except FileNotFoundError:
            return
        except (OSError, RecursionError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"server.state_file: {self._path} cannot be read: {error}: mend it, or move it away"
            ) from None
        for name in state.unloaded:
            if served.get(name) is not None:
                served.forget(served.remove(name))
        for adapter in state.loaded:
            if adapter.on_demand and not on_demand:
                continue
            self._restore(adapter, served, roots)

    def _restore(self, adapter: SavedAdapter, served: ServedModels, roots: AdapterRoots) -> None:
        try:
            check_adapter_name(adapter.name, served.base_names)
            path = roots.resolve(adapter.path)
        except RequestError as error:
            logger.warning(
                "%s: adapter %r is not served again: %s", self._path, adapter.name, error
            )
            return
        digest = None if adapter.on_demand else adapter.digest
        key = served.next_key(adapter.name)
        served.add(key, path, digest, on_demand=adapter.on_demand, limits=adapter.limits)

    def changed(self, served: ServedModels) -> None:
        """Write the adapters that are served now, soon."""
        if self._path is None:
            return
        self._changes += 1
        self._served = served
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())

    async def saved(self) -> None:
        """Wait until every change is in the file. A file that cannot be written is logged."""
        while self._writing is not None and self._written < self._changes:
            await asyncio.shield(self._writing)

    async def _write_all(self) -> None:
        while self._written < self._changes:
            changes, state = self._changes, _state_of(self._served)
            try:
                await asyncio.to_thread(self._write, state)
                self._failure = None
            except OSError as error:
                if self._failure != str(error):
                    logger.error("server.state_file: %s cannot be written: %s", self._path, error)
                self._failure = str(error)
            self._written = changes

    def _write(self, state: SavedState) -> None:
        assert self._path is not None
        fresh = self._path.with_name(f".{self._path.name}.new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)


def _decode(data: bytes, path: Path) -> SavedState:
    """Raises ConfigError: it is of another version, whatever else that holds."""
    found = msgspec.json.decode(data, type=_AnyState).format
    if found != FORMAT:
        raise ConfigError(
            f"server.state_file: {path} has format {found}, wanted {FORMAT}: move it away"
        )
    return msgspec.json.decode(data, type=SavedState)


def _state_of(served: ServedModels) -> SavedState:
    configured = set(served.configured)
    adapters = list(served.adapters())
    names = {adapter.key.name for adapter in adapters if adapter.key in configured}
    return SavedState(
        loaded=tuple(
            SavedAdapter(
                name=adapter.key.name,
                path=adapter.path,
                digest=None if adapter.on_demand else adapter.digest,
                on_demand=adapter.on_demand,
                limits=None
                if adapter.limits == served.configured_limits(adapter.key.name)
                else adapter.limits,
            )
            for adapter in adapters
            if adapter.key not in configured
        ),
        unloaded=tuple(key.name for key in served.configured if key.name not in names),
    )
