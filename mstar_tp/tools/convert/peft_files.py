"""Writing a checked adapter as PEFT writes it: its keys, and a config that says the same.

Modules are named in full, so the config holds for the base model whatever it names alike. Scalings
become alphas of their own, module by module; fused factors become those of their slices.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mstar_tp.common.module_names import CheckpointRules
from mstar_tp.lora.format.adapter_files import WEIGHTS_NAME, StoredTensor, open_file
from mstar_tp.lora.format.checkpoint import AdapterFile, AdapterModule
from mstar_tp.lora.format.peft_config import CONFIG_NAME
from mstar_tp.lora.spec import LoraParallel
from mstar_tp.tensor_files.header import torch_dtype
from mstar_tp.tensor_files.writer import TensorEntry, TensorWriter

_PREFIX = "base_model.model."


class _Stored(NamedTuple):
    """Rows ``rows`` of a tensor of the source; no tensor: zeros."""

    entry: TensorEntry
    tensor: StoredTensor | None
    rows: range


class _Factor(NamedTuple):
    rank: int
    alpha: float


@dataclass(slots=True)
class _Parts:
    """The parts of the files.

    ``names``: from the model's own names of its modules to PEFT's.
    """

    names: CheckpointRules
    tensors: dict[str, _Stored] = field(default_factory=dict)
    factors: dict[str, _Factor] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tied_alpha: dict[str, _Factor] = field(default_factory=dict)

    def put(self, key: str, tensor: StoredTensor, rows: range | None = None) -> None:
        shape = tensor.info.shape
        rows = range(shape[0]) if rows is None else rows
        entry = TensorEntry(tensor.info.dtype, (len(rows), *shape[1:]))
        self.tensors[f"{_PREFIX}{key}"] = _Stored(entry, tensor, rows)


def write_peft(
    file: AdapterFile, folder: Path, *, base: str | None, tying: bool, names: CheckpointRules
) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` into ``folder``.

    ``base`` is what the config says of the base model; ``tying``: PEFT ties what is trained of a
    head to its embedding (ensure_weight_tying); ``names`` are what PEFT calls the model's modules.
    Blocks on the disk.

    Raises:
        AdapterError: a file has changed since it was checked.
    """
    parts = _Parts(names)
    biased = any(module.bias is not None for module in file.modules)
    for module in file.modules:
        _add_module(parts, module, biased)
    for saved in file.rows:
        name = names.own(saved.name)
        if isinstance(saved.ids, range):
            parts.saved.append(name)
            parts.put(f"{name}.weight", saved.tensor)
        elif not saved.target.tied or saved.tensor not in _tensors_of(parts):
            parts.tokens[name] = list(saved.ids)
            parts.put(f"{name}.token_adapter.trainable_tokens_delta", saved.tensor)
    for norm in file.norms:
        name = names.own(norm.name)
        parts.saved.append(name)
        parts.put(f"{name}.weight", norm.tensor)
    config = _config(parts, base=base, biased=biased, tying=tying)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(f"{text}\n", encoding="utf-8")
    _write_tensors(file, folder / WEIGHTS_NAME, parts.tensors)


def _tensors_of(parts: _Parts) -> list[StoredTensor | None]:
    return [stored.tensor for stored in parts.tensors.values()]


def _add_module(parts: _Parts, module: AdapterModule, biased: bool) -> None:
    target, layer, slices, _ = module.place
    factor = _Factor(module.lora_rank, _alpha(module.scaling, module.lora_rank))
    if module.swapped:
        # PEFT makes them of the embedding's own.
        parts.tied_alpha[parts.names.own(module.name)] = factor
        return
    start = 0
    for index in slices:
        name = parts.names.own(target.module(layer, index))
        parts.factors[name] = factor
        if target.parallel is LoraParallel.VOCAB_IN:
            parts.put(f"{name}.lora_embedding_A", module.a)
            parts.put(f"{name}.lora_embedding_B", module.b)
            continue
        rows = range(start, start + target.out_slices[index].out_features)
        start = rows.stop
        parts.put(f"{name}.lora_A.weight", module.a)
        parts.put(f"{name}.lora_B.weight", module.b, rows)
        if module.bias is not None:
            parts.put(f"{name}.lora_B.bias", module.bias, rows)
        elif biased:
            entry = TensorEntry(module.b.info.dtype, (len(rows),))
            parts.tensors[f"{_PREFIX}{name}.lora_B.bias"] = _Stored(entry, None, rows)


def _alpha(scaling: float, rank: int) -> float:
    """The number that divided by the rank is the scaling, bit for bit where there is one."""
    near = scaling * rank
    for alpha in (float(round(near)), near, math.nextafter(near, 0), math.nextafter(near, 1e300)):
        if alpha / rank == scaling:
            return int(alpha) if alpha.is_integer() else alpha
    return near


def _config(parts: _Parts, *, base: str | None, biased: bool, tying: bool) -> dict[str, Any]:
    ranks = Counter(factor.rank for factor in parts.factors.values())
    alphas = Counter(factor.alpha for factor in parts.factors.values())
    rank = ranks.most_common(1)[0][0] if ranks else 1
    alpha = alphas.most_common(1)[0][0] if alphas else 1
    factors = {**parts.factors, **parts.tied_alpha}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {n: f.rank for n, f in factors.items() if f.rank != rank},
        "alpha_pattern": {n: f.alpha for n, f in factors.items() if f.alpha != alpha},
        "target_modules": list(parts.factors),
        "modules_to_save": parts.saved or None,
        "trainable_token_indices": parts.tokens or None,
        "ensure_weight_tying": tying,
        "use_rslora": False,
        "lora_bias": biased,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _write_tensors(file: AdapterFile, path: Path, tensors: Mapping[str, _Stored]) -> None:
    entries = {key: stored.entry for key, stored in tensors.items()}
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(part)) for part in file.files]
        writer = stack.enter_context(TensorWriter(path, entries))
        for key, (entry, tensor, rows) in tensors.items():
            if tensor is None:
                writer.write(key, torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype)))
            else:
                writer.write(key, files[tensor.file].read_rows(tensor.key, rows))
