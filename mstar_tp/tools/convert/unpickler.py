"""The process that reads a pickle and does nothing else.

It runs as ``python -m mstar_tp.tools.convert.unpickler FD``.

Its input is the pickle, descriptor FD the safetensors file that it writes, its output one JSON
object: ``{}``, or ``{"refused": why}``. torch's weights-only reader makes nothing but tensors and
plain containers, and runs no code of the file. Should that fail, the process can open no file and
no socket, change nothing on disk but what it writes to FD, and take no more memory and time than a
file of this size needs.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import re
import resource
import signal
import sys
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from mstar_tp.tensor_files.writer import TensorEntry, TensorWriter

MEMORY_BYTES = 256 << 20
CPU_SECONDS = 30
BYTES_A_SECOND = 20 << 20
_MAX_WORDS = 300
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32",
}  # fmt: skip

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Landlock's version -> how many rights on files it knows; 16 after that."""


class RefusedError(Exception):
    """A refusal of the pickle: the end of a sentence that begins with the file's name."""


def main() -> int:
    """Read, check, write; the exit code is 0 if a word was said."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    size = os.fstat(0).st_size
    torch.set_num_threads(1)
    _warm_up()
    confine(libc, size)
    said: dict[str, str] = {}
    try:
        tensors = read_tensors(sys.stdin.buffer, size)
        entries = {k: TensorEntry(_CODES[t.dtype], tuple(t.shape)) for k, t in tensors.items()}
        with TensorWriter(int(sys.argv[1]), entries) as writer:
            for key, tensor in tensors.items():
                writer.write(key, tensor.detach())
    except RefusedError as error:
        said["refused"] = str(error)
    except MemoryError:
        said["refused"] = "needs more memory than a file of its size should"
    except Exception as error:
        memory = "allocate memory" in str(error)
        said["refused"] = (
            "needs more memory than a file of its size should"
            if memory
            else f"cannot be read: {_short(f'{type(error).__name__}: {error}')}"
        )
    print(json.dumps(said), flush=True)
    return 0


def confine(libc: Any, size: int) -> None:
    """Limit this process for good to what reading a pickle of ``size`` bytes takes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    # The loaded tensors, and one of them again while it is written.
    memory = held + 3 * size + MEMORY_BYTES
    seconds = int(used) + CPU_SECONDS + size // BYTES_A_SECOND
    _forbid_files(libc)
    free = os.dup(0)  # the lowest descriptor that is free: none below it is
    os.close(free)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, max_tensor_bytes(size) + (100 << 20)),
        (resource.RLIMIT_NOFILE, free),
    ):
        # A shell or a batch system may allow less already, and not be overruled.
        hard = resource.getrlimit(limit)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (most, most))


def _forbid_files(libc: Any) -> None:
    """Forbid this process to open, make, rename or remove a path, if the kernel has Landlock."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return
    rights = ctypes.c_uint64((1 << _LANDLOCK_RIGHTS.get(version, 16)) - 1)
    rules = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rights), ctypes.sizeof(rights), 0)
    if rules < 0:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _warm_up() -> None:
    """Import everything that is imported at its first use, before no file can be opened."""
    "".encode("cp437")  # names in a zip
    for zipped in (True, False):
        file = io.BytesIO()
        weight = torch.nn.Parameter(torch.zeros(2))
        torch.save({"x": weight}, file, _use_new_zipfile_serialization=zipped)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)["x"].detach().numpy()
    with torch.no_grad():
        torch.zeros(2, 2, dtype=torch.bfloat16).t().contiguous().view(torch.uint8).numpy()


def max_tensor_bytes(size: int) -> int:
    """The most bytes of tensors in a file of ``size``: views may share what is stored."""
    return 4 * size + (1 << 20)


def read_tensors(file: BinaryIO, size: int) -> dict[str, torch.Tensor]:
    """Every tensor of the pickle by its key.

    Raises:
        RefusedError: the file is damaged, wants code to run, or holds something else.
    """
    head = file.read(4)
    file.seek(0)
    if head == b"PK\x03\x04":
        _check_zip(file, size)
        file.seek(0)
    elif not head.startswith(b"\x80"):
        raise RefusedError("is no pickle, nor what torch.save writes" if head else "is empty")
    try:
        tree = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RefusedError(_why_refused(str(error))) from None
    if isinstance(tree, Mapping) and isinstance(tree.get("state_dict"), Mapping):
        tree = tree["state_dict"]
    if not isinstance(tree, Mapping):
        raise RefusedError(f"holds a {type(tree).__name__}, wanted tensors by name")
    for key, value in tree.items():
        _check_entry(key, value)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
    if num_bytes > max_tensor_bytes(size):
        raise RefusedError(
            f"declares {num_bytes} bytes of tensors, but is {size} bytes itself: it is damaged, or "
            "made to fill a disk"
        )
    return dict(tree)


def _check_entry(key: object, value: object) -> None:
    if not isinstance(key, str):
        raise RefusedError(f"has the key {_short(repr(key))}, wanted the name of a tensor")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise RefusedError(
            f"holds {_short(key)} of type {type(value).__name__}, wanted tensors and nothing else"
        )
    assert isinstance(value, torch.Tensor)
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.dtype not in _CODES:
        raise RefusedError(
            f"holds {_short(key)} as {value.dtype}, {str(value.layout).removeprefix('torch.')}, on "
            f"{value.device}: wanted a dense tensor of {', '.join(_CODES.values())}"
        )


def _check_zip(file: BinaryIO, size: int) -> None:
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise RefusedError(f"is damaged: {_short(str(error))}: copy it again") from None
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise RefusedError(
            f"holds {_short(packed.filename)} compressed, which torch.save never does: it may be "
            "made to fill memory"
        )
    if sum(entry.file_size for entry in entries) > size:
        raise RefusedError("declares more bytes than it has: it is damaged")


def _why_refused(text: str) -> str:
    """torch's reason, without its advice to read the file unsafely."""
    wanted = re.search(r"(?:GLOBAL|class|global) ([\w.]+)", text)
    if wanted is not None:
        return (
            f"wants {_short(wanted[1])} to be called, which is no tensor: it was not read; whoever "
            "trusts it can save its tensors alone with torch.save(model.state_dict(), ...)"
        )
    said = text.rpartition("WeightsUnpickler error:")[2].splitlines()
    own = (line.strip() for line in said if "weights_only" not in line)
    return f"is no pickle of tensors: {_short(next(filter(None, own), 'it is damaged'))}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."


if __name__ == "__main__":
    sys.exit(main())
