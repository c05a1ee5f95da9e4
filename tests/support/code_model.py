"""Stand-ins for what a test must hold in its hand: the model and the readers' threads.

The model has no weights but the adapters': a token *is* the number of the adapter that its row ran
on, on every rank, so a row that ran on other weights stops its rank at once. So does one whose
pages hold anything but its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read, describe
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.layers.attention.attention import AttentionRow, KVCache
from mstar_tp.lora.device.deltas import LoraLayerDelta
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import tiny_spec
from mstar_tp.wire.values import AdapterKey
from support.interleaving import InterleavedEvent, Interleaving

TARGET = "self_attn.qkv_proj"
VISION_MODULE = "base_model.model.vision_tower.layers.0.self_attn.q_proj"
IMAGE_TOKENS = 2
"""The tokens of an image in the stage that encodes it."""
HIDDEN = 16
CODES = 60
"""Adapters are numbered 1 to this; the base is 0."""
SCALE = 0.01
"""Entries of B in adapter 1."""
_DELTA_OF_ONE = 2 * 2 * 0.1 * HIDDEN * SCALE
"""The delta of ones through adapter 1: scaling 2, rank 2, A's entries 0.1."""


def code_spec(world_size: int, **limits: int) -> LoraSpec:
    """A spec for ``CodeModel`` that any number of ranks can share."""
    return tiny_spec(
        hidden=HIDDEN,
        heads=world_size,
        kv_heads=world_size,
        inner=world_size,
        layers=1,
        **limits,
    )


def vision_spec(world_size: int, **limits: int) -> LoraSpec:
    """A spec for the node of ``CodeModel`` that encodes images."""
    spec = code_spec(world_size, **limits)
    (target,) = (t for t in spec.targets if t.name == TARGET)
    return replace(spec, targets=(replace(target, stack="vision_tower.layers"),))


class CodeModel:
    """A model whose deltas show the adapter: each must be its own id times ``_DELTA_OF_ONE``.

    Token ids are adapters' codes. An image's pixels are the code of the adapter that it is encoded
    on. Keys in ``cache`` are ids, values are places.
    """

    def __init__(
        self, rank: int, pools: Sequence[LoraAdapterPool], world_size: int, cache: KVCache
    ) -> None:
        """``pools``: the decoder's last, after that of images where there is one."""
        self._rank = rank
        self._cache = cache
        deltas = [pool.deltas.layer_delta(TARGET, 0) for pool in pools]
        self._delta, self._image_delta = deltas[-1], deltas[0]
        target = next(t for t in pools[-1].spec.targets if t.name == TARGET)
        self._width = sum(len(part) for part in target.out_ranges(rank, world_size))
        self.images_encoded = 0
        self.plan_error: BaseException | None = None

    def prepare_thread(self) -> None:
        torch.set_num_threads(1)

    def ids(self, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return (
            values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
        )

    def plan_decode(self, ids: Sequence[int], rows: Sequence[Any]) -> bool:
        return False

    def plan(self, rows: Sequence[AttentionRow]) -> Sequence[AttentionRow]:
        if self.plan_error is not None:
            raise self.plan_error
        return [row._replace(pages=tuple(row.pages)) for row in rows]

    def forward(
        self,
        ids: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        context: Sequence[AttentionRow],
        images: Sequence[Any],
    ) -> torch.Tensor:
        if isinstance(ids, torch.Tensor):
            ids = ids.tolist()
        seen = [row.images[i].pixels[0] for row in images for i in row.begins]
        if seen:
            self.images_encoded += len(seen)
            self._check("images", self._image_delta, [c for c in seen for _ in range(IMAGE_TOKENS)])
        self._attend(ids, context)
        return self._check("tokens", self._delta, ids)

    def _attend(self, ids: Sequence[int], rows: Sequence[AttentionRow]) -> None:
        """Each row writes its tokens, then reads all up to its last."""
        size, first = self._cache.k.shape[1], 0
        for row in rows:
            start, end = row.context, row.context + row.num_tokens
            slots = [row.pages[at // size] * size + at % size for at in range(end)]
            keys, values = self._cache.k_slots, self._cache.v_slots
            new = ids[first : first + row.num_tokens]
            keys[slots[start:], 0] = torch.tensor(new, dtype=keys.dtype)
            values[slots[start:], 0] = torch.arange(start, end, dtype=values.dtype)
            found = [*zip(keys[slots, 0].tolist(), values[slots, 0].tolist(), strict=True)]
            wanted = [(new[0], at) for at in range(end)]
            assert found == wanted, f"rank {self._rank}: pages hold {found}, wanted {wanted}"
            first += row.num_tokens

    def _check(self, what: str, delta: LoraLayerDelta, wanted: Sequence[int]) -> torch.Tensor:
        y = delta(torch.zeros(len(wanted), self._width), torch.ones(len(wanted), HIDDEN))
        codes = (y[:, 0] / _DELTA_OF_ONE).round().to(torch.int64)
        assert codes.tolist() == list(wanted), (
            f"rank {self._rank}: {what} of adapters {list(wanted)} ran on {codes.tolist()}"
        )
        return codes

    def logits(self, codes: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        if self._rank:
            return None
        return torch.nn.functional.one_hot(codes[list(rows)], CODES + 1).float()


class InterleavedReaders:
    """Each read is a task of its own, and each header check ends when it is told to."""

    def __init__(self, land: Land, interleaving: Interleaving, name: str) -> None:
        self._land = land
        self._interleaving = interleaving
        self.name = name
        self._count = 0
        self.checks: list[Callable[[], None]] = []
        self.failed: list[AdapterKey] = []
        """Adapters whose read failed here, one entry a read."""

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        read.done = InterleavedEvent(self._interleaving, f"the read of {read.key}")
        self._count += 1
        self._interleaving.start(f"{self.name}-{self._count}", partial(self._run, read, work))

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        self.checks.append(work)

    def close(self) -> None:
        self.checks.clear()

    def check(self) -> None:
        """Let the oldest header check end."""
        self.checks.pop(0)()

    def _run(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        try:
            adapter = work()
        except AdapterError as error:
            cause = describe(error, read.key)
        else:
            self._land(read, adapter, None)
            return
        if not read.dropped:
            self.failed.append(read.key)
        self._land(read, None, cause)
