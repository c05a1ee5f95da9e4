"""The feed-forward block of mixture-of-experts families.

Legend: T tokens of the step, D hidden size, E experts, K experts a token.
"""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.distributed.shard import OutSlice
from mstar_tp.layers.linear import ColumnParallelLinear
from mstar_tp.layers.moe import ExpertNames, RoutedExperts, route
from mstar_tp.layers.weights import Placement
from mstar_tp.models.blocks import ACTIVATIONS
from mstar_tp.models.config.families import ModelConfig

_NAMES = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")


class SparseMlp(nn.Module):
    """Each token through the experts that a router chooses, summed by the router's weights.

    The router is whole on every rank, and its input is the same on every rank, so all choose alike;
    each expert's inner features are dealt to the ranks.
    """

    def __init__(self, config: ModelConfig, place: Placement, names: ExpertNames = _NAMES) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None, "a layer with experts in a model without"
        self.num_per_token = experts.per_token
        self.normalise = experts.normalise
        # One block of rows for all ranks: each holds a copy.
        router = OutSlice(name="gate", out_features=experts.num_experts, units=1)
        self.gate = ColumnParallelLinear(config.hidden_size, (router,), place)
        self.experts = RoutedExperts(
            config.hidden_size,
            experts.inner_size,
            experts.num_experts,
            names,
            ACTIVATIONS[config.activation],
            place,
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]. Collective: one all_reduce."""
        routing = route(self.gate(x_TD), self.num_per_token, self.normalise)
        out: torch.Tensor = self.experts(x_TD, routing)
        return out
