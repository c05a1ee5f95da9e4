"""Random models and adapters to measure with: built in, or adapters for a given model's folder.

Needs transformers for a built-in model.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mstar_tp.common.errors import ConfigError
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.testing.tiny_models import Family, make_tiny_model

VOCAB = 2048
ID_LOW, ID_HIGH = 300, 2000
"""Token ids of prompts: below the smallest vocabulary, past what is special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's sizes."""

    family: Family = "llama"
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = VOCAB
    dtype: torch.dtype

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def gemms(self) -> dict[str, tuple[int, int]]:
        """The linears of a layer as the server fuses them: name -> (out, in)."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def weight_bytes(self) -> int:
        """The bytes of all layers' linears."""
        size = sum(out * inputs for out, inputs in self.gemms().values())
        return size * self.layers * self.dtype.itemsize


_NANO: dict[str, Any] = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
SHAPES = {
    "nano": Shape(**_NANO, layers=2, dtype=torch.float32),
    "tiny": Shape(
        hidden=256, inner=688, layers=4, heads=8, kv_heads=4, head_dim=32, dtype=torch.float32
    ),
    "small": Shape(
        family="qwen2",
        hidden=896,
        inner=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
    ),
    "large": Shape(
        hidden=4096,
        inner=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
    ),
}
"""``large`` is for kernels alone: no such model is ever written."""
MADE = ("nano", "tiny", "small")


def shape_of(folder: Path) -> Shape:
    """The sizes in a model folder's config.json.

    Raises:
        ConfigError: there is none, or it is not one decoder's with plain sizes.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
        return Shape(
            family=config["model_type"],
            hidden=hidden,
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            dtype=dtype,
        )
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: give a model's folder") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file}: has not the sizes of one decoder ({error!r}): give another model's folder"
        ) from error


def make_model(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """A random model with a byte-level tokenizer, as a Hugging Face folder.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        settings: dict[str, Any] = {
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 4096,
        }
        if shape.family == "qwen2":
            settings["use_sliding_window"] = False
        make_tiny_model(folder, shape.family, seed, dtype=shape.dtype, **settings)
    except ImportError as error:
        raise ConfigError(
            f"a built-in model is made with transformers, which is not here ({error}): install "
            "mstar-tp[bench], or give a model's folder"
        ) from error
    _write_tokenizer(folder, shape.vocab)
    return folder


def make_adapters(
    folder: Path, shape: Shape, count: int, rank: int, prefix: str = "lora"
) -> dict[str, str]:
    """Random adapters on all seven linears, each with weights of its own: name -> folder."""
    spec = tiny_spec(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        inner=shape.inner,
        layers=shape.layers,
        max_rank=rank,
    )
    found = {}
    for number in range(count):
        pairs = random_pairs(spec, rank=rank, seed=number, dtype=shape.dtype)
        for name, factor in pairs.items():
            # A delta is about half as large as what it is added to.
            factor.mul_(factor.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.25))
        path = write_adapter(folder / f"{prefix}-{number:02}", pairs, r=rank, lora_alpha=2 * rank)
        found[path.name] = str(path)
    return found


def named_adapters(items: list[str]) -> dict[str, str]:
    """Adapters given as NAME=PATH.

    Raises:
        ConfigError: one is not of that form, or there is no such folder.
    """
    found = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not (name and equals and os.path.exists(path)):
            raise ConfigError(f"--lora: got {item!r}, wanted NAME=PATH of an adapter that is there")
        found[name] = path
    return found


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Bytes, and a word for each further id, so that every output has text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate(letters)}
    ids |= {f"Ġw{number}": number for number in range(len(letters), vocab)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
