"""Every environment variable this package reads, and the only place that reads them.

All are parsed strictly: a value that cannot be understood is a ConfigError that names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mstar_tp.common.errors import ConfigError

VARIABLES = {
    "RANK": "this rank's number in its group (set by torchrun)",
    "WORLD_SIZE": "ranks in the group (set by torchrun); absent or 1: no group at all",
    "LOCAL_RANK": "this rank's number on its machine; its GPU (set by torchrun)",
    "LOCAL_WORLD_SIZE": "ranks on this machine; they share its cores (set by torchrun)",
    "TORCHELASTIC_RESTART_COUNT": "how often torchrun started the group again (set by torchrun)",
    "GLOO_SOCKET_IFNAME": "interface of the CPU collectives; default: loopback on one machine",
    "MSTAR_TP_SECRET": "shared secret of an instance over several machines, 16 characters or more",
    "MSTAR_TP_SECRET_FILE": "a file that holds the shared secret; a last newline is no part of it",
    "MSTAR_TP_API_KEY": "API keys, with spaces between: as api_key, but not to be seen in ps",
    "MSTAR_TP_ADMIN_KEY": "the operators' key: as admin_key, but not to be seen in ps",
    "MSTAR_TP_LOG_LEVEL": "DEBUG, INFO (default), WARNING or ERROR",
    "MSTAR_TP_CPU_KERNELS": "0: run CPU steps on torch alone; default 1: compile our kernels",
    "MSTAR_TP_SHARED_MEMORY": "0: CPU ranks of one machine use gloo, as over several; default 1",
    "TOKENIZERS_PARALLELISM": "true: texts are encoded on a pool of the tokenizers library's own",
    "XDG_CACHE_HOME": "where compiled CPU kernels are kept; default ~/.cache",
    "MSTAR_TP_TEST_MODE": "1: this server is under test, and may be told to fail",
    "MSTAR_TP_FAULTS": "a file of faults to make (mstar_tp.testing.faults); for test mode only",
}
"""Variables by name, with their meaning for the docs and ``mstar-tp --help``.

MASTER_ADDR and MASTER_PORT are torch's own: its rendezvous reads them."""

_API_KEYS = ("MSTAR_TP_API_KEY", "MSTAR_TP_ADMIN_KEY")

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """The place of this process as torchrun tells it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0


def rank_env() -> RankEnv:
    """This process's place in its group; a group of one when torchrun did not start it.

    Raises:
        ConfigError: a variable is missing, no number, or out of range.
    """
    world_size = _number("WORLD_SIZE", 1, least=1)
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {world_size} but RANK is not set: start with torchrun")
    env = RankEnv(
        rank=_number("RANK", 0),
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1, least=1),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
    )
    for name, index, size in (
        ("RANK", env.rank, env.world_size),
        ("LOCAL_RANK", env.local_rank, env.local_world_size),
    ):
        if index >= size:
            raise ConfigError(f"{name} is {index}, wanted 0 to {size - 1}: start with torchrun")
    return env


def secret() -> str | None:
    """The instance's shared secret, or None.

    Raises:
        ConfigError: the secret's file cannot be read, or both variables are set.
    """
    value = os.environ.get("MSTAR_TP_SECRET")
    path = os.environ.get("MSTAR_TP_SECRET_FILE")
    if value is not None and path is not None:
        raise ConfigError("MSTAR_TP_SECRET and MSTAR_TP_SECRET_FILE are both set: unset one")
    if path is None:
        return value
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MSTAR_TP_SECRET_FILE: {path} cannot be read: {error}") from None


def api_keys() -> list[str]:
    """The API keys in the environment."""
    return os.environ.get("MSTAR_TP_API_KEY", "").split()


def admin_key() -> str | None:
    """The operators' key in the environment, or None.

    Raises:
        ConfigError: it holds spaces.
    """
    words = os.environ.get("MSTAR_TP_ADMIN_KEY", "").split()
    if len(words) > 1:
        raise ConfigError("MSTAR_TP_ADMIN_KEY holds spaces, which no key may: it is one key")
    return words[0] if words else None


def log_level() -> str:
    """The level to log at.

    Raises:
        ConfigError: MSTAR_TP_LOG_LEVEL is no level.
    """
    level = os.environ.get("MSTAR_TP_LOG_LEVEL", "INFO")
    if level not in LOG_LEVELS:
        raise ConfigError(f"MSTAR_TP_LOG_LEVEL is {level!r}, wanted one of {', '.join(LOG_LEVELS)}")
    return level


def tokenize_on_own_thread() -> None:
    """Have the tokenizers library encode a text on the thread that asks.

    On its own pool one text would wait behind another. TOKENIZERS_PARALLELISM overrules this.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def faults_file() -> str | None:
    """The file that says which faults to make, or None.

    Raises:
        ConfigError: there is one and this is no test, or MSTAR_TP_TEST_MODE is neither 0 nor 1.
    """
    mode = os.environ.get("MSTAR_TP_TEST_MODE", "0")
    if mode not in ("0", "1"):
        raise ConfigError(f"MSTAR_TP_TEST_MODE is {mode!r}, wanted 0 or 1")
    path = os.environ.get("MSTAR_TP_FAULTS")
    if path is not None and mode == "0":
        raise ConfigError(
            "MSTAR_TP_FAULTS is set: faults are made in tests only: unset it, or set "
            "MSTAR_TP_TEST_MODE=1 for a server that nobody relies on"
        )
    return path


def wants_cpu_kernels() -> bool:
    """True if CPU steps may run kernels that are compiled on this machine.

    Raises:
        ConfigError: MSTAR_TP_CPU_KERNELS is neither 0 nor 1.
    """
    return _switch("MSTAR_TP_CPU_KERNELS")


def wants_shared_memory() -> bool:
    """True if collectives of CPU ranks on one machine may go through shared memory.

    Raises:
        ConfigError: MSTAR_TP_SHARED_MEMORY is neither 0 nor 1.
    """
    return _switch("MSTAR_TP_SHARED_MEMORY")


def cache_folder() -> Path:
    """This user's folder for what can be made again. It may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mstar_tp"


def prefer_gloo_interface(name: str) -> None:
    """Let the CPU collectives use interface ``name``, unless the operator chose one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def child_environment(**added: str) -> dict[str, str]:
    """This process's environment for a process it starts, with ``added``.

    The API's keys are left out.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _API_KEYS}
    return {**kept, **added}


def bare_environment(kept: Iterable[str], **added: str) -> dict[str, str]:
    """The variables ``kept`` of this process's environment, and ``added``.

    It is for a process that is to know no more.
    """
    return {**{name: os.environ[name] for name in kept if name in os.environ}, **added}


def become_rank(rank: int, world_size: int, restarts: int) -> None:
    """Say in this process's environment what torchrun would: for a rank that was forked."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        TORCHELASTIC_RESTART_COUNT=str(restarts),
    )


def _switch(name: str) -> bool:
    value = os.environ.get(name, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{name} is {value!r}, wanted 0 or 1")
    return value == "1"


def _number(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r}, wanted a whole number from {least}")
    return int(text)
