"""Compiles the C++ sources for the machine it runs on, once, and loads it.

The library is kept in a folder of the user's own under a name that hashes the source, the flags,
the compiler and the processor, so another version or machine never loads it. Without a compiler
there are no CPU kernels, and torch runs the same steps slower.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from mstar_tp.common import env

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("cpu.cpp", "linear.cpp", "collectives.cpp", "decode.cpp"))
HEADERS = tuple(
    _HERE / name for name in ("floats.h", "vectors.h", "gemm.h", "deltas.h", "grouped.h")
)
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp",
    # What lets loops be vectorised and changes no sum: nobody here reads errno or traps.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
COMPILE_S = 300


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with a logged reason) where they cannot be had.

    torch must be imported first: the kernels run on its OpenMP threads.
    """
    if not env.wants_cpu_kernels():
        return None
    compiler = _compiler()
    if compiler is None:
        logger.warning(
            "no C++ compiler (c++, g++ or clang++) on PATH: CPU steps run without our kernels, "
            "slower; install one to change that"
        )
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "could not compile the CPU kernels with %s; steps run slower: %s", compiler, error
        )
        return None


def _compiler() -> str | None:
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def _compiled(compiler: str) -> Path:
    folder = _private_folder()
    path = folder / f"cpu-{_fingerprint(compiler)}.so"
    if _is_whole(path):
        return path
    # The ranks of a machine start together: one compiles, the others wait for it.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(path):
            logger.info("compiling the CPU kernels (once on this machine)")
            _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        out = Path(scratch) / path.name
        command = [compiler, *_flags(compiler), *map(str, SOURCES), "-o", str(out)]
        run = subprocess.run(command, check=False, capture_output=True, timeout=COMPILE_S)
        if run.returncode:
            said = run.stderr.decode(errors="replace").strip()  # whatever the user's locale
            raise OSError(f"{' '.join(command)}: {said[-2000:]}")
        _digest_file(path).write_text(_digest(out))
        out.replace(path)


def _is_whole(path: Path) -> bool:
    """Tell whether the library is as compiled: loading a truncated one would kill the process."""
    try:
        return _digest_file(path).read_bytes() == _digest(path).encode()
    except FileNotFoundError:
        return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flags(compiler: str) -> list[str]:
    known: tuple[str, ...] = FLAGS
    if platform.machine() not in ("x86_64", "AMD64"):
        known = tuple(flag for flag in FLAGS if not flag.startswith("-mprefer"))
    return list(known)


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_S
    ).stdout.decode(errors="replace")
    texts = [source.read_text() for source in (*SOURCES, *HEADERS)]
    parts = (*texts, " ".join(_flags(compiler)), version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _private_folder() -> Path:
    """A folder that only this user can write: what lies there is run.

    Raises:
        OSError: there is no place for it, it cannot be made, or others may write to it.
    """
    try:
        folder = env.cache_folder() / "kernels"
    except RuntimeError:  # a user without a home, as a container may have
        raise OSError("no home folder to keep them in: set HOME or XDG_CACHE_HOME") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} is not this user's alone: make it so, or set XDG_CACHE_HOME")
    return folder
