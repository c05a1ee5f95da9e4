"""Small LoRA specs and adapter folders written by hand, tensor by tensor: for tests of adapters.

Where ``tiny_models`` writes what PEFT writes, this writes whatever a test wants to see placed or
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.lora.spec import DEFAULT_SAVED_ROWS, LoraParallel, LoraSpec, LoraTarget
from mstar_tp.lora.stage_rows import RowGrouping

STANDARD = "base_model.model.model.layers.{layer}.{module}"
"""A module as PEFT names it."""


def tiny_spec(
    *,
    hidden: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 2,
    inner: int = 16,
    layers: int = 2,
    slots: int = 2,
    max_rank: int = 4,
    cpu_capacity: int = 4,
) -> LoraSpec:
    """All seven linears of a Llama-shaped model, as its own modules would describe them."""

    def slices(**parts: tuple[int, int]) -> tuple[OutSlice, ...]:
        return tuple(OutSlice(name=n, out_features=o, units=u) for n, (o, u) in parts.items())

    def target(name: str, size: int, parts: tuple[OutSlice, ...], kind: LoraParallel) -> LoraTarget:
        return LoraTarget(
            name=name,
            stack="model.layers",
            num_layers=layers,
            parent=name.rpartition(".")[0],
            in_features=size,
            out_slices=parts,
            parallel=kind,
            in_units=size,
        )

    q, kv = (heads * head_dim, heads), (kv_heads * head_dim, kv_heads)
    column, row = LoraParallel.COLUMN, LoraParallel.ROW
    return LoraSpec(
        targets=(
            target("self_attn.qkv_proj", hidden, slices(q_proj=q, k_proj=kv, v_proj=kv), column),
            target("self_attn.o_proj", q[0], slices(o_proj=(hidden, 1)), row),
            target(
                "mlp.gate_up_proj",
                hidden,
                slices(gate_proj=(inner, inner), up_proj=(inner, inner)),
                column,
            ),
            target("mlp.down_proj", inner, slices(down_proj=(hidden, 1)), row),
        ),
        slots=slots,
        max_rank=max_rank,
        cpu_capacity=cpu_capacity,
        dtype="float32",
    )


def with_vocab(
    spec: LoraSpec, vocab: int, *, tied: bool = False, max_saved_rows: int = DEFAULT_SAVED_ROWS
) -> LoraSpec:
    """The spec with the model's embedding and head too."""
    hidden = spec.targets[0].in_features

    def target(name: str, size_in: int, size_out: int, kind: LoraParallel) -> LoraTarget:
        parent, _, leaf = name.rpartition(".")
        embeds = kind is LoraParallel.VOCAB_IN
        return LoraTarget(
            name=name,
            stack="",
            num_layers=1,
            parent=parent,
            in_features=size_in,
            out_slices=(OutSlice(name=leaf, out_features=size_out, units=size_out),),
            parallel=kind,
            in_units=size_in,
            row_grouping=RowGrouping.TOKENS if embeds else RowGrouping.SAMPLED,
            tied=tied and not embeds,
        )

    targets = (
        *spec.targets,
        target("model.embed_tokens", vocab, hidden, LoraParallel.VOCAB_IN),
        target("lm_head", hidden, vocab, LoraParallel.VOCAB_OUT),
    )
    return replace(spec, targets=targets, max_saved_rows=max_saved_rows)


def with_norms(spec: LoraSpec) -> LoraSpec:
    """The spec with the norm before attention, and the last one."""
    layers, hidden = spec.targets[0].num_layers, spec.targets[0].in_features

    def target(name: str, stack: str, num_layers: int) -> LoraTarget:
        parent, _, leaf = name.rpartition(".")
        return LoraTarget(
            name=name,
            stack=stack,
            num_layers=num_layers,
            parent=parent,
            in_features=hidden,
            out_slices=(OutSlice(name=leaf, out_features=hidden, units=1),),
            parallel=LoraParallel.NORM,
            in_units=hidden,
        )

    norms = target("input_layernorm", "model.layers", layers), target("model.norm", "", 1)
    return replace(spec, targets=(*spec.targets, *norms))


def pair(
    module: str,
    size_in: int,
    size_out: int,
    *,
    rank: int = 2,
    a: float = 0.1,
    b: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """One module's A and B, every entry of each the same, under PEFT's keys."""
    return {
        f"{module}.lora_A.weight": torch.full((rank, size_in), a, dtype=dtype),
        f"{module}.lora_B.weight": torch.full((size_out, rank), b, dtype=dtype),
    }


def q_pairs(spec: LoraSpec, **how: Any) -> dict[str, torch.Tensor]:
    """q_proj of every layer."""
    target = spec.targets[0]
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(target.num_layers):
        name = STANDARD.format(layer=layer, module="self_attn.q_proj")
        size_out = target.out_slices[0].out_features
        tensors |= pair(name, target.in_features, size_out, **how)
    return tensors


def random_pairs(
    spec: LoraSpec, *, rank: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Every slice of every target and layer, random."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for target in spec.targets:
        for layer in range(target.num_layers):
            for index, part in enumerate(target.out_slices):
                name = f"base_model.model.{target.module(layer, index)}"
                a = torch.randn(rank, target.in_features, generator=generator)
                b = torch.randn(part.out_features, rank, generator=generator)
                tensors[f"{name}.lora_A.weight"] = a.to(dtype)
                tensors[f"{name}.lora_B.weight"] = b.to(dtype)
    return tensors


def write_adapter(folder: str | Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter folder.

    ``config`` overrides PEFT's settings (r 2, lora_alpha 4), None included.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": sorted({_leaf(key) for key in tensors if ".lora_" in key}),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(
        {k: v.clone().contiguous() for k, v in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def _leaf(key: str) -> str:
    """The last word of the module that a LoRA key names."""
    return key.partition(".lora_")[0].rpartition(".")[2]
