"""The two shapes that one mixture-of-experts model has in transformers.

One has stacked experts, as it is today, and one a linear for each of an expert's three, as
published adapters were trained on.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn


class Names(NamedTuple):
    """The names of the block and of an expert's linears in published checkpoints."""

    block: str
    gate: str
    up: str
    down: str


QWEN = Names("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = Names("block_sparse_moe", "w1", "w3", "w2")


def names_of(model: Any) -> Names:
    return MIXTRAL if model.config.model_type == "mixtral" else QWEN


def with_linear_experts(model: Any) -> Any:
    """A copy of a transformers model whose router and experts are plain linears."""
    model, names = copy.deepcopy(model), names_of(model)
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        block = _Block(layer.mlp, names, model.config)
        del layer.mlp
        setattr(layer, names.block, block)
        if names.block != "mlp":
            layer.mlp = _Call(layer, names.block)
    # PEFT takes configs for a model of the first kind by this name, and rewrites them.
    model.config.model_type = "linear_experts"
    return model


class _Call:
    """A layer's block under another name; no module, so it stands in no path."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer = layer
        self._name = name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self._layer, self._name)(x)
        return out


class _Block(nn.Module):
    def __init__(self, block: Any, names: Names, config: Any) -> None:
        super().__init__()
        self.num_per_token = config.num_experts_per_tok
        self.normalise = getattr(config, "norm_topk_prob", True)
        self.gate = _linear(block.gate.weight)
        self.experts = nn.ModuleList(
            _Expert(gate_up, down, names)
            for gate_up, down in zip(
                block.experts.gate_up_proj, block.experts.down_proj, strict=True
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.num_per_token)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out[rows] += weights[rows, places, None] * expert(tokens[rows])
        return out.view_as(x)


class _Expert(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, names: Names) -> None:
        super().__init__()
        self._names = names
        gate, up = gate_up.chunk(2)
        for name, weight in ((names.gate, gate), (names.up, up), (names.down, down)):
            setattr(self, name, _linear(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self._names[1:])
        out: torch.Tensor = down(nn.functional.silu(gate(x)) * up(x))
        return out


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.detach().clone()
    return linear
