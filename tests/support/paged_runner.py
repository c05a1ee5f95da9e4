"""Running a loaded model step by step over paged KV, without an engine.

Pages are dealt out of order and shared by all sequences, so a wrong page or offset shows in the
logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.layers.attention.attention import (
    AttentionRow,
    ForwardContext,
    KVCache,
    build_attention_plan,
)
from mstar_tp.models.blocks import CausalLM


class PagedRunner:
    """Sequences of one model, each with its cached tokens.

    Under tensor parallelism every rank runs one alike.
    """

    def __init__(self, model: CausalLM, *, num_pages: int = 64, page_size: int = 4) -> None:
        config, place = model.config, model.place
        self.model = model
        self.page_size = page_size
        self.caches = [
            KVCache.allocate(
                num_pages, page_size, model.num_kv_heads, config.head_dim, place.dtype, place.device
            )
            for _ in range(config.num_layers)
        ]
        # Every other page first: no sequence's pages are neighbours.
        self._free = [*range(0, num_pages, 2), *range(1, num_pages, 2)]
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[str, Sequence[int]]]) -> list[torch.Tensor] | None:
        """One step: each row gives new tokens to the sequence it names.

        Returns each row's logits [tokens, vocab], one for every new token, on rank 0; None
        elsewhere. Collective on the model's group.
        """
        tokens: list[int] = []
        positions: list[int] = []
        plan_rows: list[AttentionRow] = []
        for name, new in rows:
            start = self._lengths.get(name, 0)
            plan_rows.append(AttentionRow(len(new), start, self._grow(name, start + len(new))))
            tokens += new
            positions += range(start, start + len(new))
        device = self.model.place.device
        plan = build_attention_plan(plan_rows, self.page_size, device)
        hidden = self.model(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            ForwardContext(plan, self.caches),
        )
        logits = self.model.compute_logits(hidden)
        return None if logits is None else list(torch.split(logits, [len(new) for _, new in rows]))

    def prefill(
        self, name: str, tokens: Sequence[int], chunk: int | None = None
    ) -> torch.Tensor | None:
        """The logits of a whole prompt, run ``chunk`` tokens a step (default: all at once)."""
        size = chunk or len(tokens)
        parts = [self.step([(name, tokens[i : i + size])]) for i in range(0, len(tokens), size)]
        kept = [part[0] for part in parts if part is not None]
        return torch.cat(kept) if kept else None

    def pages_of(self, name: str) -> Sequence[int]:
        """The pages of a sequence, in order."""
        return self._pages[name]

    def _grow(self, name: str, length: int) -> list[int]:
        pages = self._pages.setdefault(name, [])
        while len(pages) * self.page_size < length:
            pages.append(self._free.pop(0))
        self._lengths[name] = length
        return pages
