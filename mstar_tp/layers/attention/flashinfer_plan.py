"""Attention by FlashInfer's kernels, where that package is installed.

Its two wrappers run over our pages, which lie as its layout NHD has them.

A step whose rows all have one token takes the decode wrapper, any other the prefill wrapper. A
wrapper is planned when the first layer of its kind (window, cap, scale) asks, and used by all of
them. Step thread. Its plans are made on the host, so no captured graph may hold them.

Legend: T tokens of the step, X = heads * head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mstar_tp.common.errors import ConfigError
from mstar_tp.layers.attention import attention_ops  # noqa: F401 - registers the operators
from mstar_tp.layers.attention.shape import AttentionShape
from mstar_tp.layers.attention.torch_plan import AttentionRow

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 128 << 20
"""The size that FlashInfer recommends for its split sums."""
_CLASSES = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
_PLAIN_GROUPS = (1, 2)
"""Query heads a key head up to which its decode kernel without tensor cores is the better one."""


def load_flashinfer(shape: AttentionShape, dtype: torch.dtype) -> Any:
    """The package, if it can serve layers of this shape.

    Raises:
        ConfigError: it is not installed, or cannot.
    """
    asked = "--attention-backend flashinfer"
    if shape.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"{asked} serves heads of {', '.join(map(str, HEAD_DIMS))} and this model's have "
            f"{shape.head_dim}: use triton"
        )
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{asked} serves float16 and bfloat16, not {name}: use triton")
    try:
        library = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{asked} needs the package flashinfer-python, which cannot be imported: {error}"
        ) from None
    lacking = [name for name in _CLASSES if not hasattr(library, name)]
    if lacking:
        raise ConfigError(f"{asked}: the package has no {lacking[0]}: install a newer one")
    return library


class _Kind(NamedTuple):
    window: int | None
    softcap: float | None
    scale: float
    decodes: bool


class FlashInferPlanner:
    """Makes plans for layers of one shape (windows, scales and caps may differ)."""

    def __init__(
        self,
        library: Any,
        shape: AttentionShape,
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._library = library
        self._shape = shape
        self._dtype = dtype
        self._page_size = page_size
        self._device = device
        # Runs follow one another on one stream, so all wrappers share it. It starts as zeros.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, Any] = {}

    def plan(self, rows: Sequence[AttentionRow]) -> FlashInferPlan:
        """Tables of a step's own."""
        page_size = self._page_size
        lengths = np.array([row.context + row.num_tokens for row in rows], np.int32)
        used = -(-lengths // page_size)
        pages, slots = [], []
        for row, count in zip(rows, used.tolist(), strict=True):
            mine = np.array(row.pages[:count], np.int32)
            positions = np.arange(row.context, row.context + row.num_tokens)
            pages.append(mine)
            slots.append(mine[positions // page_size] * page_size + positions % page_size)
        tables = _Tables(
            starts=_ends([row.num_tokens for row in rows]),
            page_starts=_ends(used),
            last_lengths=torch.from_numpy(lengths - (used - 1) * np.int32(page_size)),
            pages=self._to_device(np.concatenate(pages)),
            slots=self._to_device(np.concatenate(slots).astype(np.int32)),
            decodes=all(row.num_tokens == 1 for row in rows),
        )
        return FlashInferPlan(self, tables)

    def wrapper(self, kind: _Kind, tables: _Tables) -> Any:
        """The wrapper of this kind of layers, planned for the step."""
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._make(kind.decodes)
            self._wrappers[kind] = wrapper
        heads = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        pages = tables.page_starts, tables.pages, tables.last_lengths
        kept = {
            # FlashInfer counts the keys left of a query, we the query too.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap or 0.0,
            "sm_scale": kind.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        if kind.decodes:
            wrapper.plan(*pages, *heads, self._page_size, **kept)
        else:
            wrapper.plan(tables.starts, *pages, *heads, self._page_size, causal=True, **kept)
        return wrapper

    def _make(self, decodes: bool) -> Any:
        if not decodes:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        group = self._shape.num_heads // self._shape.num_kv_heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=group not in _PLAIN_GROUPS
        )

    def _to_device(self, indices: np.ndarray[Any, Any]) -> torch.Tensor:
        # The host waits here for all that was launched, and must: a wrapper's own plan goes through
        # one piece of page-locked memory, which the next ``plan`` would write during the read.
        return torch.from_numpy(indices).to(self._device)


class _Tables(NamedTuple):
    """A step's tables, int32.

    On the host, where plans are made: ``starts``, ``page_starts`` [B + 1] where a row's tokens and
    pages begin, ``last_lengths`` [B] keys in a row's last page. On the device: ``pages`` of all
    rows, and ``slots`` [T].
    """

    starts: torch.Tensor
    page_starts: torch.Tensor
    last_lengths: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    decodes: bool


class FlashInferPlan:
    """One step's layout."""

    def __init__(self, planner: FlashInferPlanner, tables: _Tables) -> None:
        self._planner = planner
        self._tables = tables
        self._planned: dict[_Kind, Any] = {}

    @property
    def num_tokens(self) -> int:
        return self._tables.slots.shape[0]

    def attend(
        self,
        shape: AttentionShape,
        q_TX: torch.Tensor,
        k_TX: torch.Tensor,
        v_TX: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> torch.Tensor:
        """Keep k and v in the cache and attend with q: [T, H*D]."""
        torch.ops.mstar_attention.write(cache_k, cache_v, k_TX, v_TX, self._tables.slots)
        kind = _Kind(shape.window, shape.softcap, shape.scale, self._tables.decodes)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planner.wrapper(kind, self._tables)
            self._planned[kind] = wrapper
        q_THD = q_TX.contiguous().view(-1, shape.num_heads, shape.head_dim)
        out: torch.Tensor = wrapper.run(q_THD, (cache_k, cache_v))
        return out.flatten(1)


def _ends(counts: Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
    """The places where each count begins and the last ends: int32 [len(counts) + 1]."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
