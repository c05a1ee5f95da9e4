"""The cost of checking a thousand adapters: bytes, seconds, and the gain of doing it in parallel.

    python scripts/bench_check.py                    # 1,000 adapters of rank 8 for 32 layers
    python scripts/bench_check.py --delay-ms 5       # each file opened takes as long, as over a net

Adapters have the headers and sizes of real ones (all seven linears of a 7B model) over files with
holes, so nothing but what is read takes room. *Alike*: made by one recipe. *Unlike*: each header
differs, and every check is a full one. Every byte that the checker asks the system for is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.tools.check.adapters import inspect_adapters
from mstar_tp.tools.check.base_model import ModelValidator

HIDDEN, INNER, HEADS, LAYERS = 4096, 11008, 32, 32
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    spec = tiny_spec(
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        inner=INNER,
        layers=LAYERS,
        max_rank=16,
    )
    with tempfile.TemporaryDirectory(prefix="bench-check-") as folder:
        for like in (True, False):
            _measure(Path(folder) / str(like), spec, args, like=like)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    return parser.parse_args()


def _measure(folder: Path, spec: LoraSpec, args: argparse.Namespace, *, like: bool) -> None:
    adapters = [
        (f"a{n}", str(_write(folder / f"a{n}", args.rank, 0 if like else n)))
        for n in range(args.count)
    ]
    size = sum(Path(path, "adapter_model.safetensors").stat().st_size for _, path in adapters)
    heads = sum(_head_bytes(Path(path)) for _, path in adapters)
    print(f"{args.count} adapters, {'alike' if like else 'unlike'}: {size / 2**30:.1f} GiB")
    seconds: dict[int, float] = {}
    for threads in (1, 8):
        with _counted(args.delay_ms) as counted:
            start, cpu = time.perf_counter(), time.process_time()
            found = inspect_adapters(
                ModelValidator({"": spec}, 2, torch.bfloat16, None), adapters, threads=threads
            )
            seconds[threads] = time.perf_counter() - start
            cpu = time.process_time() - cpu
        assert all(facts.servable for facts in found), found[0].refusals
        print(
            f"  {threads} threads: {seconds[threads]:.2f} s ({cpu:.2f} of a core), "
            f"{counted['bytes'] / 2**20:.1f} MiB read of {size / 2**20:.0f} (configs and headers "
            f"are {heads / 2**20:.1f}), {counted['weights']} bytes of weights"
        )
    print(f"  side by side takes {seconds[8] / seconds[1]:.2f} of one after another")


def _write(folder: Path, rank: int, number: int) -> Path:
    """A folder with a header as PEFT writes it, over a hole."""
    folder.mkdir(parents=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "number": str(number)}}
    end = 0
    for layer in range(LAYERS):
        for module, (size_in, size_out) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for half, shape in (("A", [rank, size_in]), ("B", [size_out, rank])):
                start, end = end, end + 2 * shape[0] * shape[1]
                header[f"{name}.lora_{half}.weight"] = {
                    "dtype": "BF16",
                    "shape": shape,
                    "data_offsets": [start, end],
                }
    raw = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(name.rpartition(".")[2] for name in MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _head_bytes(folder: Path) -> int:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    with weights.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little") + config.stat().st_size


@contextmanager
def _counted(delay_ms: float) -> Iterator[dict[str, int]]:
    """Count the bytes read.

    They are those of files' starts (``pread``), of configs (all of them, when they are opened), and
    of weights (``preadv``).
    """
    counted, lock, configs = {"bytes": 0, "weights": 0}, threading.Lock(), set[int]()
    real = {name: getattr(os, name) for name in ("pread", "preadv", "open")}

    def pread(fd: int, length: int, offset: int) -> bytes:
        data: bytes = real["pread"](fd, length, offset)
        with lock:
            counted["bytes"] += 0 if fd in configs else len(data)
        return data

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        got: int = real["preadv"](fd, buffers, offset)
        with lock:
            counted["bytes"] += got
            counted["weights"] += got
        return got

    def opened(path: Any, flags: int, *more: Any) -> int:
        if delay_ms and str(path).endswith((".json", ".safetensors")):
            time.sleep(delay_ms / 1000)
        fd: int = real["open"](path, flags, *more)
        with lock:
            configs.discard(fd)
            if str(path).endswith("config.json"):
                configs.add(fd)
                counted["bytes"] += os.fstat(fd).st_size
        return fd

    os.pread, os.preadv, os.open = pread, preadv, opened  # type: ignore[assignment]
    try:
        yield counted
    finally:
        os.pread, os.preadv, os.open = real["pread"], real["preadv"], real["open"]


if __name__ == "__main__":
    main()
