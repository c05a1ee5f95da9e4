"""Hand-written adapters of a model's embedding, head and norms, and what slots make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mstar_tp.lora.device.slot_weights import Backend, SlotWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import tiny_spec, with_norms, with_vocab

VOCAB = 33  # not divisible by two: the second rank's part is padded
FULL = with_norms(with_vocab(tiny_spec(slots=3), VOCAB))
TIED = with_vocab(tiny_spec(slots=3), VOCAB, tied=True)
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
NORM = "base_model.model.model.layers.1.input_layernorm"
Tensors = dict[str, torch.Tensor]
CHOSEN: dict[str, Backend] = {"backend": "auto"}


@pytest.fixture(params=["auto", "ops"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots as this device has them, and as a CUDA device does."""
    monkeypatch.setitem(CHOSEN, "backend", request.param)


def embedding_pair(b: float = 0.1, rank: int = 2) -> Tensors:
    """A[k, t] = t / 100: every token has a change of its own."""
    a = (torch.arange(VOCAB) / 100.0).repeat(rank, 1)
    return {f"{EMBED}.lora_embedding_A": a, f"{EMBED}.lora_embedding_B": torch.full((8, rank), b)}


def head_pair(rank: int = 2) -> Tensors:
    """B[v, k] = (v + 1) / 100."""
    return {
        f"{HEAD}.lora_A.weight": torch.full((rank, 8), 0.1),
        f"{HEAD}.lora_B.weight": ((torch.arange(VOCAB) + 1) / 100.0)[:, None].repeat(1, rank),
    }


class Base:
    """A base model's weights by name."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights

    def read_rows(self, name: str, rows: range) -> torch.Tensor | None:
        tensor = self.weights.get(name)
        return None if tensor is None else tensor[rows.start : rows.stop]


def slots_of(spec: LoraSpec, adapters: Mapping[int, LoadedAdapter], rank: int, ws: int) -> Any:
    weights = SlotWeights(
        spec,
        rank=rank,
        world_size=ws,
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend=CHOSEN["backend"],
    )
    weights.install(list(adapters.items()))
    return weights


def embed(weights: Any, ids: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The change of each token's embedding on one rank."""
    y = torch.zeros(len(ids), 8)
    plan = weights.plan(slots, [1] * len(slots), slots)
    if plan.vocab is not None:
        weights.embedding("model.embed_tokens").add(y, ids, plan.vocab.tokens)
    return y


def head(weights: Any, x: torch.Tensor, slots: list[int], base: torch.Tensor) -> torch.Tensor:
    """Logits of one rank's part, from the base's."""
    plan, y = weights.plan(slots, [1] * len(slots), slots), base.clone()
    if plan.vocab is not None:
        weights.head("lm_head").add(y, x, plan.vocab.samples)
    return y


def tokens(module: str, ids: list[int], value: float = 7.0) -> Tensors:
    rows = torch.full((len(ids), 8), value) + torch.tensor(ids)[:, None]
    return {f"{module}.token_adapter.trainable_tokens_delta": rows}
