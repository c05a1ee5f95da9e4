"""The loaded model with its KV cache on one rank: what a step needs, behind four calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.layers.attention import (
    AttentionRow,
    ForwardContext,
    KVCache,
    build_attention_plan,
)
from mstar_tp.models.blocks import CausalLM


class ServedModel:
    """Owned by the step thread once the rank serves; start-up uses it on the main thread before
    that.
    """

    def __init__(
        self,
        module: CausalLM,
        kv: list[KVCache],
        page_size: int,
        device: torch.device,
        threads: int,
    ) -> None:
        self.module = module
        self._kv = kv
        self._page_size = page_size
        self._device = device
        self._threads = threads

    def prepare_thread(self) -> None:
        """Settings that torch keeps a thread: without them this thread would compute with the
        default number.
        """
        torch.set_num_threads(self._threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        """int64 [len(values)] on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def plan(self, rows: Sequence[AttentionRow]) -> ForwardContext:
        """Lay out attention for the step's rows, in the order of their tokens."""
        plan = build_attention_plan(rows, self._page_size, self._device)
        return ForwardContext(attn=plan, kv=self._kv)

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], positions: Sequence[int], context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states [len(ids), hidden_size]. Collective on the model's group."""
        hidden: torch.Tensor = self.module(self.ids(ids), self.ids(positions), context)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """Logits [len(rows), vocab_size] of these rows on rank 0, None elsewhere. Collective."""
        if len(rows) < hidden.shape[0]:
            hidden = hidden[self.ids(rows)]
        return self.module.compute_logits(hidden)
