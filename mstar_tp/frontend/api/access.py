"""Access to routes: API keys with the adapters each may name, and keys of operators.

Keys come from the configuration, the environment and a file. What is kept of one is its SHA-256,
and a request's key is compared with all of them, each in constant time: how long that takes tells
nothing. Read once at the start; the tables never change afterwards. No torch.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import HTTPConnection

from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError
from mstar_tp.config import ServerConfig
from mstar_tp.frontend.api.api_errors import ApiError, printable

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 << 20

Glob = Annotated[str, Field(min_length=1)]


class KeyEntry(BaseModel):
    """One key of the file: in plain, or as the SHA-256 of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    name: str = ""
    """The key's name in the log."""
    adapters: list[Glob] | None = None
    """Names, or patterns of names (``*`` goes over ``/`` too), that it may ask for; all without."""
    base: bool = True
    """True when the key may ask for the base model."""
    admin: bool = False
    """True when the key may use the operators' routes too."""

    @model_validator(mode="after")
    def _one_of_two(self) -> KeyEntry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("wanted either key or sha256")
        if self.key is not None and (self.key != self.key.strip() or not self.key.isprintable()):
            raise ValueError("key has spaces around it, or characters that no header can hold")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 is not None else _digest(self.key or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rights of the sender of one request."""

    adapters: tuple[str, ...] | None = None
    """Patterns of names; None: every adapter."""
    base: bool = True
    admin: bool = False

    @property
    def whole(self) -> bool:
        """Return whether it may name everything."""
        return self.adapters is None and self.base

    def allows(self, name: str, base_names: Sequence[str]) -> bool:
        """Return whether it may ask for the model ``name``, served or not."""
        if name in base_names:
            return self.base
        return self.adapters is None or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.adapters
        )

    def check(self, name: str, base_names: Sequence[str], param: str = "model") -> None:
        """Raises ApiError: 403, the same whether or not there is such a model."""
        if not self.allows(name, base_names):
            raise ApiError(
                403,
                f"this key may not use the model '{printable(name)}'",
                param=param,
                code="model_not_allowed",
            )


EVERYTHING = Access()


class KeyRing:
    """The keys of one server. Answers from any thread."""

    def __init__(self, entries: Sequence[KeyEntry], operators: Sequence[str] = ()) -> None:
        """``operators``: keys that open the operators' routes and nothing else."""
        self._clients = [
            (
                entry.digest,
                Access(
                    adapters=None if entry.adapters is None else tuple(entry.adapters),
                    base=entry.base,
                    admin=entry.admin,
                ),
            )
            for entry in entries
        ]
        self._operators = [_digest(key) for key in operators]
        self._has_admins = bool(operators) or any(entry.admin for entry in entries)

    @property
    def guarded(self) -> bool:
        """Return whether clients need a key."""
        return bool(self._clients)

    @property
    def operators_guarded(self) -> bool:
        """Return whether operators need a key that other clients have not."""
        return self._has_admins

    def client(self, request: HTTPConnection) -> Access:
        """Return what the request may name.

        Raises:
            ApiError: 401, it carries none of the keys.
        """
        if not self._clients:
            return EVERYTHING
        access = self._find(_token(request))
        if access is None:
            raise _unauthorized()
        return access

    def operator(self, request: HTTPConnection) -> None:
        """Refuse a request that may not manage the server.

        It needs an admin key where there is one, else any key that may name everything.

        Raises:
            ApiError: 401, it carries none of the keys; 403, its key is no operator's.
        """
        if not self._clients and not self._operators:
            return
        token = _token(request)
        access, matches = self._find(token), _matches(token, self._operators)
        if any(matches):
            return
        if access is None:
            raise _unauthorized()
        if not (access.admin or (access.whole and not self._has_admins)):
            raise ApiError(403, "this key may not manage the server", code="not_an_operator")

    def _find(self, token: bytes | None) -> Access | None:
        matches = _matches(token, [digest for digest, _ in self._clients])
        found = [access for (_, access), same in zip(self._clients, matches, strict=True) if same]
        return found[0] if found else None


def key_ring(server: ServerConfig) -> KeyRing:
    """The keys that the configuration, the environment and the key file hold. Reads the file.

    Raises:
        ConfigError: the file cannot be read or holds something else, or a key stands twice.
    """
    plain = [*server.api_key, *env.api_keys()]
    entries = [KeyEntry(key=key) for key in dict.fromkeys(plain) if key]
    if server.api_key_file is not None:
        entries += read_keys(server.api_key_file)
    operators = [key for key in (server.admin_key, env.admin_key()) if key]
    seen: dict[bytes, str] = {}
    for number, entry in enumerate(entries):
        what = entry.name or f"number {number + 1}"
        if entry.digest in seen:
            raise ConfigError(
                f"server.api_key_file: keys {seen[entry.digest]} and {what} are the same: each "
                "key may stand once, here, in api_key and in MSTAR_TP_API_KEY"
            )
        seen[entry.digest] = what
    return KeyRing(entries, operators)


def read_keys(path: str) -> list[KeyEntry]:
    """The entries of a key file: YAML, or JSON, a list under ``keys``.

    Raises:
        ConfigError: it cannot be read, or holds something else; never what a key is.
    """
    where = f"server.api_key_file: {path}"
    try:
        file = Path(path)
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{where} is no file of at most {MAX_FILE_BYTES} bytes")
        tree: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{where} cannot be read: {why}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"{where} is no YAML{line}") from None
    if os.name == "posix" and status.st_mode & 0o077:
        logger.warning("%s can be read by other users of this machine: chmod 600 it", where)
    listed = tree.get("keys") if isinstance(tree, dict) else None
    if not isinstance(listed, list) or not listed or set(tree) != {"keys"}:
        raise ConfigError(f"{where}: wanted one key 'keys' with a list of entries")
    entries = []
    for number, item in enumerate(listed, start=1):
        try:
            entries.append(KeyEntry.model_validate(item))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"])
            text = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{where}: entry {number}{at and f', {at}'}: {text}") from None
    return entries


def _token(request: HTTPConnection) -> bytes | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    return given.strip().encode("utf-8", "replace")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _matches(token: bytes | None, digests: Sequence[bytes]) -> list[bool]:
    given = hashlib.sha256(token or b"").digest()
    return [hmac.compare_digest(given, digest) and token is not None for digest in digests]


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a valid key is needed: send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
