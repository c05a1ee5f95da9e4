"""The loaded model with its KV cache on one rank: what a step needs, behind four calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from mstar_tp.distributed.start import use_device
from mstar_tp.engine.step.images import RowImages
from mstar_tp.kernels.staging import to_device
from mstar_tp.layers.attention.attention import (
    AttentionPlanner,
    AttentionRow,
    ForwardContext,
    GivenRows,
    KVCache,
)
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.cpp_decode import CppDecoder

PROMPT_TOKENS = 128
"""The tokens from which a step of a small model is worth more threads than a decoding one."""


@runtime_checkable
class ReadsImages(Protocol):
    """A model with a stage for images."""

    def encode_images(self, pixels_NCSS: torch.Tensor) -> torch.Tensor:
        """uint8 pixels [N, 3, S, S] -> hidden states of their tokens [N, P, D]. Collective."""
        ...


class ServedModel:
    """The loaded model, owned by the step thread once the rank serves.

    Start-up uses it on the main thread before that.
    """

    def __init__(
        self,
        module: CausalLM,
        kv: list[KVCache],
        planner: AttentionPlanner,
        device: torch.device,
        threads: int,
        prompt_threads: int,
        cpp_decoder: CppDecoder | None = None,
    ) -> None:
        """``threads`` compute a step, ``prompt_threads`` one of PROMPT_TOKENS tokens or more.
        ``cpp_decoder``: runs decoding steps as the module does, in one call.
        """
        self._cpp_decoder = cpp_decoder
        self.module = module
        self.kv = kv
        self.planner = planner
        self._device = device
        self._threads = threads
        self._prompt_threads = prompt_threads

    @property
    def cores(self) -> int:
        """The most cores that its steps keep busy."""
        on_cpu = self._device.type == "cpu"
        return max(self._threads, self._prompt_threads) if on_cpu else 1

    def prepare_thread(self) -> None:
        """Make the settings that torch keeps for each thread.

        Without them this thread would compute with the default number of threads.
        """
        torch.set_num_threads(self._threads)
        use_device(self._device)

    def ids(self, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """int64 [len(values)] on the model's device."""
        if isinstance(values, torch.Tensor):
            return values
        return to_device(values, torch.int64, self._device)

    def plan(self, rows: Sequence[AttentionRow]) -> ForwardContext:
        """Lay out attention for the step's rows, in the order of their tokens."""
        return ForwardContext(attn=self.planner.plan(rows), kv=self.kv)

    def plan_decode(self, ids: Sequence[int], rows: Sequence[AttentionRow]) -> bool:
        """Lay out a step of rows with one new token each, all of which sample, for ``decode``.

        Returns False where it must go through ``plan``, ``forward`` and ``logits``.
        """
        return self._cpp_decoder is not None and self._cpp_decoder.plan(ids, rows)

    @torch.inference_mode()
    def decode(self) -> torch.Tensor | None:
        """Run the step that ``plan_decode`` laid out: logits [rows, vocab_size] on rank 0.

        Other ranks get None. The bits are those of ``forward`` and ``logits``. Collective.
        """
        assert self._cpp_decoder is not None, "nothing was planned"
        return self._cpp_decoder.run()

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        context: ForwardContext,
        images: Sequence[RowImages] = (),
    ) -> torch.Tensor:
        """Hidden states [len(ids), hidden_size]. Collective on the model's group.

        ``images``: those of the step's rows whose requests have any.
        """
        if images:
            self._encode(images)
            context = replace(context, given=self._given(images))
        more = self._prompt_threads > self._threads and len(ids) >= PROMPT_TOKENS
        if more:
            torch.set_num_threads(self._prompt_threads)
        hidden: torch.Tensor = self.module(self.ids(ids), self.ids(positions), context)
        if more:
            torch.set_num_threads(self._threads)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """Logits [len(rows), vocab_size] of these rows on rank 0, None elsewhere. Collective."""
        if len(rows) < hidden.shape[0]:
            hidden = hidden[self.ids(rows)]
        return self.module.compute_logits(hidden)

    @torch.inference_mode()
    def encode(self, images: Sequence[bytes]) -> torch.Tensor:
        """Hidden states of images' tokens [N, P, D], from pixels uint8 [3, S, S]. Collective."""
        assert isinstance(self.module, ReadsImages), "the model reads no images"
        side = round((len(images[0]) / 3) ** 0.5)
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        pixels_NCSS = pixels.view(len(images), 3, side, side).to(self._device)
        return self.module.encode_images(pixels_NCSS)

    def _encode(self, rows: Sequence[RowImages]) -> None:
        """Encode the images that begin in this step, all in one forward of their stage."""
        begins = [(row, index) for row in rows for index in row.begins]
        if not begins:
            return
        encoded_NPD = self.encode([row.images[index].pixels for row, index in begins])
        for (row, index), encoded_PD in zip(begins, encoded_NPD, strict=True):
            row.encoded[index] = encoded_PD

    def _given(self, rows: Sequence[RowImages]) -> GivenRows | None:
        """The step's image tokens; an image all of whose tokens have run is forgotten."""
        places: list[int] = []
        parts: list[torch.Tensor] = []
        for row in rows:
            for piece in row.pieces():
                first = row.place + piece.first
                places += range(first, first + len(piece.tokens))
                encoded_PD = row.encoded[piece.image]
                parts.append(encoded_PD[piece.tokens.start : piece.tokens.stop])
                if row.is_last(piece):
                    del row.encoded[piece.image]
        return GivenRows(self.ids(places), torch.cat(parts)) if parts else None
