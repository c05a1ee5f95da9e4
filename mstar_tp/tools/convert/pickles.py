"""Reading pickles without unpickling: another process does it, which writes a safetensors file."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from mstar_tp.common.env import bare_environment
from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.checkpoint import readable
from mstar_tp.tensor_files.reader import read_header

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "HOME")


def pickle_to_safetensors(source: Path, target: Path) -> None:
    """Write the pickle's tensors to ``target``, whose header is checked.

    Blocks until the process that reads has ended.

    Raises:
        AdapterError: the pickle holds something else, is damaged, or asks for more than its size
            explains; the file is named.
    """
    said, code = _run(source, target)
    if code == -signal.SIGXCPU:
        raise AdapterError(f"{source}: takes longer to read than a file of its size should")
    try:
        answer = json.loads(said) if code == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise AdapterError(
            f"{source}: the process that read it ended with {ended} and said nothing: the file is "
            "damaged, or made to break its reader"
        )
    if "refused" in answer:
        raise AdapterError(f"{source}: {readable(str(answer['refused']))}")
    read_header(target, error=AdapterError)


def _open(source: Path) -> BinaryIO:
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        file = open(os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise AdapterError(f"{source}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterError(f"{source}: is not a regular file: give the file itself")
    return file


def _run(source: Path, target: Path) -> tuple[bytes, int]:
    """(what the process said, its exit code)."""
    paths = [os.path.abspath(path) for path in sys.path if path]
    env = bare_environment(_KEPT_VARIABLES, PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    with _open(source) as file, open(target, "xb") as out:
        process = subprocess.Popen(
            # -P: what lies in the current folder is imported by nobody.
            [sys.executable, "-P", "-m", "mstar_tp.tools.convert.unpickler", str(out.fileno())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(out.fileno(),),
            env=env,
        )
        try:
            said, _ = process.communicate()
        finally:
            process.kill()
            process.wait()
    return said, process.returncode
