"""Measure how much memory real rank processes take while they load a model, against the bound.

The bound: a rank's peak resident memory (VmHWM, the interpreter and torch included) stays under its
shard + the largest single tensor + 300 MB. Makes a random model of some hundred megabytes in
shards, loads it with 1 and with 2 ranks, prints a table and exits 1 if any rank is over. Linux only
(reads /proc).

    python scripts/measure_loading.py [--dtype bfloat16|float32|float16] [--layers 8] [--tied]
    [--folder KEEP_IT_HERE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ALLOWANCE_BYTES = 300_000_000
MB = 1e6
WIDTHS = (3, 5, 9, 11, 11, 11, 11, 9)
HEADINGS = ("tp", "rank", "dtype", "shard MB", "tensor MB", "bound MB", "peak MB", "at start")


class Measured(NamedTuple):
    """One rank's figures in bytes: what it holds, its peak, and its peak before it loaded."""

    shard: int
    peak: int
    before: int


def make_model(folder: Path, layers: int, tied: bool) -> None:
    """A random bfloat16 Llama in two shards: embedding and head of 131 MB each, 30 MB a layer."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocab, kv = 1024, 4096, 64_000, 256
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))

    def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
        for i in range(layers):
            at = f"model.layers.{i}"
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
            for name, size in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                yield f"{at}.self_attn.{name}_proj.weight", (size, hidden)
            for name in ("gate", "up"):
                yield f"{at}.mlp.{name}_proj.weight", (inner, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        yield "model.embed_tokens.weight", (vocab, hidden)
        if not tied:
            yield "lm_head.weight", (vocab, hidden)

    torch.manual_seed(0)
    named = list(shapes())
    weight_map = {}
    for number, part in enumerate((named[:-3], named[-3:])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(
            {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in part}, folder / file
        )
        weight_map.update({name: file for name, _ in part})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def largest_tensor(folder: Path, dtype: str) -> int:
    """Bytes of the checkpoint's largest tensor, in the dtype served."""
    from mstar_tp.tensor_files.reader import DTYPE_BYTES, read_header

    served = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    infos = [info for path in folder.glob("*.safetensors") for info in read_header(path).values()]
    return max(info.num_bytes // DTYPE_BYTES[info.dtype] * served for info in infos)


def load_as_rank(folder: str, dtype: str, rank: int, world_size: int, store: str) -> None:
    """The body of one rank process: loads, then prints its Measured as JSON."""
    import torch
    import torch.distributed as dist

    from mstar_tp.distributed.start import Rendezvous, destroy_groups, init_groups
    from mstar_tp.models.config.families import load_model_config
    from mstar_tp.models.loader import load_model

    torch.set_num_threads(1)
    meeting = Rendezvous(dist.FileStore(store, world_size), rank, world_size)
    group = init_groups(torch.device("cpu"), meeting if world_size > 1 else None).tp
    before = _high_water()
    model = load_model(
        folder, load_model_config(folder), group, getattr(torch, dtype), torch.device("cpu")
    )
    peak = _high_water()
    print(json.dumps(Measured(_held_bytes(model), peak, before)))
    destroy_groups()


def _held_bytes(model: Any) -> int:
    """Bytes of a rank's part of the checkpoint, by its weights' shapes; a tied head has none."""
    total = 0
    for module in model.modules():
        if getattr(module, "is_tied", False):
            continue
        for weight in (getattr(module, "weight", None), getattr(module, "bias", None)):
            if weight is not None:
                count = 1
                for size in weight.shape:
                    count *= size
                total += count * weight.dtype.itemsize
    return total


def _high_water() -> int:
    """Peak resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this script needs Linux")


def measure(folder: Path, dtype: str, world_size: int) -> list[Measured]:
    """Start the ranks, wait for all, and read what each measured."""
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--folder", str(folder), "--dtype", dtype),
                    *("--as-rank", str(rank), str(world_size), store),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for rank, process in enumerate(ranks):
        if process.returncode:
            raise SystemExit(f"rank {rank} of {world_size} ended with {process.returncode}")
    return [Measured(*json.loads(output.splitlines()[-1])) for output in outputs]


def row(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def report(folder: Path, dtype: str) -> bool:
    """Measure 1 and 2 ranks and print the table; whether every rank kept to the bound."""
    tensor = largest_tensor(folder, dtype)
    print(row(list(HEADINGS)))
    fits = True
    for world_size in (1, 2):
        for rank, got in enumerate(measure(folder, dtype, world_size)):
            bound = got.shard + tensor + ALLOWANCE_BYTES
            sizes = [f"{n / MB:.0f}" for n in (got.shard, tensor, bound, got.peak, got.before)]
            verdict = "" if got.peak <= bound else "  OVER"
            print(row([str(world_size), str(rank), dtype, *sizes]) + verdict, flush=True)
            fits = fits and got.peak <= bound
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tied", action="store_true", help="one weight for embedding and head")
    parser.add_argument("--folder", help="make the model here and keep it; used again if there")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank, world_size, store = options.as_rank
        load_as_rank(options.folder, options.dtype, int(rank), int(world_size), store)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            print(f"making a model in {folder} ...", flush=True)
            make_model(folder, options.layers, options.tied)
        sys.exit(0 if report(folder, options.dtype) else 1)


if __name__ == "__main__":
    main()
