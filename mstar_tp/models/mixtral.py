"""Mixtral: Mistral's layers with routed experts for the MLP."""

from __future__ import annotations

import torch

from mstar_tp.layers.moe import ExpertNames
from mstar_tp.layers.weights import MatrixPart, Placement, WeightReader
from mstar_tp.models.blocks import CausalLM, PreNormDecoder, PreNormLayer
from mstar_tp.models.blocks_moe import SparseMlp
from mstar_tp.models.config import ModelConfig

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")
PUBLISHED, STACKED = ".block_sparse_moe.", ".mlp."
"""The block's name in published checkpoints, and in those with stacked experts."""


class MixtralLayer(PreNormLayer):
    def build_feed_forward(self, config: ModelConfig, place: Placement, layer_index: int) -> None:
        self.block_sparse_moe = SparseMlp(config, place, _NAMES)

    def feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block_sparse_moe(x_TD)
        return out


class MixtralForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement, max_position: int) -> None:
        super().__init__(config, place, PreNormDecoder(config, place, max_position, MixtralLayer))

    def view(self, reader: WeightReader) -> WeightReader:
        return _EitherName(reader)


class _EitherName:
    """A checkpoint that has the block under either name."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def has(self, key: str) -> bool:
        return self._reader.has(self._stored(key))

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        self._reader.read_rows(self._stored(key), shape, rows, out)

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        self._reader.read_columns(self._stored(key), shape, columns, out)

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        self._reader.read_matrix(self._stored(key), shape, index, part, out)

    def _stored(self, key: str) -> str:
        other = key.replace(PUBLISHED, STACKED)
        return other if self._reader.has(other) else key
