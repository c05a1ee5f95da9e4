"""A forward cut at its attentions: pieces are captured, attention between them runs eagerly.

Attention is laid out anew for each step and its work depends on the rows, so it stays outside;
everything else does the same work for any rows of a number of tokens. Queries, keys and values
leave a piece, and what was attended enters the next, through one set of buffers for all layers and
sizes. Captured at start, replayed on the step thread.

Legend: T tokens of the step, N the pieces' tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from mstar_tp.engine.graphs.device import Graph, GraphDevice
from mstar_tp.layers.attention.attention import Attention, ForwardContext


class AttentionBuffers:
    """q, k, v and out, each [max_tokens, width], for layers of one size."""

    def __init__(self, layers: Sequence[Attention], max_tokens: int, like: torch.Tensor) -> None:
        """Raises ValueError: layers differ in size."""
        widths = {
            (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim)
            for s in (layer.shape for layer in layers)
        }
        if len(widths) != 1:
            raise ValueError(f"attention layers of several sizes: {sorted(widths)}")
        ((query, key),) = widths
        self._qkv = tuple(like.new_zeros(max_tokens, width) for width in (query, key, key))
        self._out = like.new_zeros(max_tokens, query)

    def keep(self, q_NX: torch.Tensor, k_NX: torch.Tensor, v_NX: torch.Tensor) -> None:
        for buffer, x_NX in zip(self._qkv, (q_NX, k_NX, v_NX), strict=True):
            buffer[: len(x_NX)].copy_(x_NX)

    def attend(self, layer: Attention, context: ForwardContext, num_tokens: int) -> None:
        """The step's ``num_tokens`` tokens, which come first; what is left over stays as it is."""
        q_TX, k_TX, v_TX = (buffer[:num_tokens] for buffer in self._qkv)
        self._out[:num_tokens].copy_(layer(q_TX, k_TX, v_TX, context))

    def out(self, size: int) -> torch.Tensor:
        return self._out[:size]


class Cutter:
    """The object in the place of attention while pieces are captured.

    Each call ends one piece and begins the next.
    """

    def __init__(self, device: GraphDevice, buffers: AttentionBuffers) -> None:
        self._device = device
        self._buffers = buffers
        self.graphs: list[Graph] = []
        self.layers: list[Attention] = []

    def attend(
        self, layer: Attention, q_NX: torch.Tensor, k_NX: torch.Tensor, v_NX: torch.Tensor
    ) -> torch.Tensor:
        self._buffers.keep(q_NX, k_NX, v_NX)
        self.graphs.append(self._device.end())
        self.layers.append(layer)
        self._device.begin()
        return self._buffers.out(len(q_NX))


class Through:
    """The object in the place of attention while the same forward runs eagerly."""

    def __init__(
        self, buffers: AttentionBuffers, context: ForwardContext | None, num_tokens: int
    ) -> None:
        """``context``: None where no token is the step's, so that nothing is attended."""
        self._buffers = buffers
        self._context = context
        self._num_tokens = num_tokens

    def attend(
        self, layer: Attention, q_NX: torch.Tensor, k_NX: torch.Tensor, v_NX: torch.Tensor
    ) -> torch.Tensor:
        self._buffers.keep(q_NX, k_NX, v_NX)
        if self._context is not None:
            self._buffers.attend(layer, self._context, self._num_tokens)
        return self._buffers.out(len(q_NX))


class Pieces:
    """Captured pieces and the attentions between them."""

    def __init__(
        self, graphs: Sequence[Graph], layers: Sequence[Attention], buffers: AttentionBuffers
    ) -> None:
        assert len(graphs) == len(layers) + 1
        self._graphs = tuple(graphs)
        self._layers = tuple(layers)
        self._buffers = buffers

    def replay(self, context: ForwardContext, num_tokens: int) -> None:
        """Run a step of ``num_tokens`` tokens, laid out in ``context``. Collective."""
        for graph, layer in zip_longest(self._graphs, self._layers):
            graph.replay()
            if layer is not None:
                self._buffers.attend(layer, context, num_tokens)
