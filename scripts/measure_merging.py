"""Measure how much memory `mstar-tp merge` takes beside its imports, against two shards.

Makes a random Llama in shards and two adapters on all linears, the head and the embedding, merges
them in a process of its own and reads that process's peak resident memory (VmHWM) before and after.
Prints a table and exits 1 when a merge took two shards or more. Linux only (reads /proc).

    python scripts/measure_merging.py [--layers 12] [--shard 500MB] [--dtypes bfloat16 float32]
    [--folder KEEP_IT_HERE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from mstar_tp.cli.tool_flags import parse_size
from mstar_tp.tensor_files.header import torch_dtype
from mstar_tp.tensor_files.writer import TensorEntry, TensorWriter
from mstar_tp.tools.merge.output import pack_shards, write_index

HIDDEN, INNER, VOCAB, RANK = 2048, 5632, 64_000, 32
MB = 1e6
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 4096, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MERGE = """
import re, sys, time
from pathlib import Path
from mstar_tp.tools.merge.merge_command import MergeOptions, merge

def peak():
    return re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]

before, began = peak(), time.monotonic()
model, one, two, out, dtype, size = sys.argv[1:]
print(merge(MergeOptions(
    model=Path(model), adapters=(Path(one), Path(two)), weights=(1.0, 0.5), out=Path(out),
    dtype=dtype, max_shard_bytes=int(size), force=False,
)))
print(before, peak(), time.monotonic() - began)
"""


class Measured(NamedTuple):
    """Bytes beside the imports at the peak, and seconds."""

    taken: int
    seconds: float


def linears(layers: int) -> dict[str, tuple[int, int]]:
    """Every linear by name, as [out, in]."""
    sizes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    sizes |= {f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    sizes["mlp.down_proj"] = (HIDDEN, INNER)
    found = {f"model.layers.{n}.{name}": s for n in range(layers) for name, s in sizes.items()}
    return {**found, "lm_head": (VOCAB, HIDDEN)}


def write(path: Path, entries: dict[str, TensorEntry], scale: float) -> None:
    """Random tensors, one at a time."""
    generator = torch.Generator().manual_seed(len(entries))
    with TensorWriter(path, entries) as writer:
        for name, entry in entries.items():
            values = torch.randn(entry.shape, generator=generator).mul_(scale)
            writer.write(name, values.to(torch_dtype(entry.dtype)))


def make_model(folder: Path, layers: int, shard: int) -> int:
    """A bfloat16 model; its bytes."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"{name}.weight": shape for name, shape in linears(layers).items()}
    for n in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{n}.{norm}.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    entries = {name: TensorEntry("BF16", shape) for name, shape in shapes.items()}
    shards = pack_shards(entries, shard)
    for part in shards:
        write(folder / part.name, part.tensors, 0.02)
    write_index(folder, shards)
    config = {**CONFIG, "num_hidden_layers": layers, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return sum(entry.num_bytes for entry in entries.values())


def make_adapter(folder: Path, layers: int) -> Path:
    entries: dict[str, TensorEntry] = {}
    for name, (out, inner) in linears(layers).items():
        stem = f"base_model.model.{name}"
        entries[f"{stem}.lora_A.weight"] = TensorEntry("F32", (RANK, inner))
        entries[f"{stem}.lora_B.weight"] = TensorEntry("F32", (out, RANK))
    stem = "base_model.model.model.embed_tokens"
    entries[f"{stem}.lora_embedding_A"] = TensorEntry("F32", (RANK, VOCAB))
    entries[f"{stem}.lora_embedding_B"] = TensorEntry("F32", (HIDDEN, RANK))
    folder.mkdir()
    write(folder / "adapter_model.safetensors", entries, 0.05)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def measure(model: Path, adapters: list[Path], out: Path, dtype: str, shard: int) -> Measured:
    told = [str(path) for path in (model, *adapters, out)]
    command = [sys.executable, "-c", MERGE, *told, dtype, str(shard)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    before, after, seconds = ended.stdout.splitlines()[-1].split()
    return Measured((int(after) - int(before)) * 1024, float(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shard", default="500MB", help="bytes of one weights file")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--folder", type=Path, help="where the files are kept (default: nowhere)")
    args = parser.parse_args()
    shard = parse_size(args.shard)
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "model").mkdir()
        size = make_model(folder / "model", args.layers, shard)
        adapters = [make_adapter(folder / part, args.layers) for part in ("one", "two")]
        print(f"model {size / MB:.0f} MB in bfloat16, shards of {shard / MB:.0f} MB")
        print("written as   beside imports MB   two shards MB   seconds")
        for dtype in args.dtypes:
            found = measure(folder / "model", adapters, folder / dtype, dtype, shard)
            failed |= found.taken >= 2 * shard
            print(
                f"{dtype:10}   {found.taken / MB:17.0f}   {2 * shard / MB:13.0f}   "
                f"{found.seconds:7.1f}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
