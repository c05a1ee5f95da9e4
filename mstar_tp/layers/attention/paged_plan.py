"""One step's layout for attention kernels that walk pages themselves: tables on the device.

A handful of int32 tables, which reach the device by one copy a step; no other thing of a launch
depends on the step. In buffers of fixed size (``PlanBuffer``) they stand at one place for ever, so
a captured graph replays any rows that fit. Step thread.

Legend: B rows, T tokens of the step, W pages a row, N tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mstar_tp.common.errors import LockstepError
from mstar_tp.kernels.staging import ALIGNED
from mstar_tp.kernels.triton.attention.sizes import prefill_sizes
from mstar_tp.layers.attention import attention_ops  # noqa: F401 - registers the operators
from mstar_tp.layers.attention.shape import AttentionShape
from mstar_tp.layers.attention.torch_plan import AttentionRow


class PlanSizes(NamedTuple):
    """The sizes of a buffer. ``tiles`` is 0 where every row has one token."""

    rows: int
    tokens: int
    pages: int
    tiles: int

    @classmethod
    def decode(cls, rows: int, pages: int) -> PlanSizes:
        """Up to ``rows`` rows of one token, each of up to ``pages`` pages."""
        return cls(rows, rows, pages, 0)

    @classmethod
    def mixed(cls, rows: int, tokens: int, pages: int, tile_queries: int) -> PlanSizes:
        """Up to ``rows`` rows with up to ``tokens`` tokens in all, however they are dealt."""
        # A row's last tile may be short; the others are full. A row of one token has none.
        return cls(rows, tokens, pages, min(rows, tokens // 2) + tokens // tile_queries)


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlan:
    """int32 tables on the device, all views of one buffer.

    Attributes:
        pages_BW: each row's pages, in token order; past its last one anything. Its columns lie side
            by side in memory.
        lengths_B: each row's keys, its new tokens' included; 0 in a padding row.
        starts: [B + 1], row b's tokens in the step are ``starts[b]`` to ``starts[b + 1]``.
        slots_T: where each token's key and value go; -1: nowhere (padding).
        tiles_N2: of rows with several tokens: each tile's row and first token; row -1: no tile.
        decodes: whether a row may have one token.
        padded: whether tokens may belong to no row.
        invariant: a row's bits must not depend on the rows beside it.
    """

    pages_BW: torch.Tensor  # noqa: N815
    lengths_B: torch.Tensor  # noqa: N815
    starts: torch.Tensor
    slots_T: torch.Tensor  # noqa: N815
    tiles_N2: torch.Tensor  # noqa: N815
    decodes: bool
    padded: bool
    invariant: bool

    @property
    def num_tokens(self) -> int:
        return self.slots_T.shape[0]

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
        torch.ops.mstar_attention.write(cache_k, cache_v, k_TX, v_TX, self.slots_T)
        out: torch.Tensor = torch.ops.mstar_attention.attend(
            q_TX,
            cache_k,
            cache_v,
            self.pages_BW,
            self.lengths_B,
            self.starts,
            self.tiles_N2,
            self.decodes,
            self.padded,
            shape.window or 0,
            shape.scale,
            shape.softcap or 0.0,
            self.invariant,
        )
        return out


class PlanBuffer:
    """A plan's tables at one place on the device, written anew each step.

    ``plan`` is the same object for ever: what a graph captured with it reads what ``fill`` wrote
    last. Until the first ``fill`` every row is padding.
    """

    def __init__(
        self,
        sizes: PlanSizes,
        page_size: int,
        tile_queries: int,
        device: torch.device,
        *,
        decodes: bool = True,
        exact: bool = False,
        invariant: bool = False,
    ) -> None:
        """``exact``: filled once, with just so many rows and tokens as it holds."""
        self.sizes = sizes
        self._page_size = page_size
        self._tile_queries = tile_queries
        self._page_locked = device.type == "cuda"
        lengths = (sizes.rows, sizes.rows + 1, sizes.tokens, 2 * sizes.tiles)
        ends = np.cumsum([-(-length // ALIGNED) * ALIGNED for length in lengths]).tolist()
        self._firsts = (0, *ends[:-1])
        self._pages_at = ends[-1]
        self._device = torch.empty(
            self._pages_at + sizes.rows * sizes.pages, dtype=torch.int32, device=device
        )
        parts = [self._device[at : at + n] for at, n in zip(self._firsts, lengths, strict=True)]
        self.plan = PagedPlan(
            # Column by column, so that those in use are one run, and copied alone.
            self._device[self._pages_at :].view(sizes.pages, sizes.rows).t(),
            parts[0],
            parts[1],
            parts[2],
            parts[3].view(sizes.tiles, 2),
            decodes,
            not exact and sizes.tiles > 0,
            invariant,
        )
        if not exact:
            self.fill(())

    def fill(self, rows: Sequence[AttentionRow]) -> PagedPlan:
        """Lay out the rows, in the order of their tokens, behind every launched step.

        Raises:
            LockstepError: the buffer does not hold so many rows, tokens, tiles or pages.
        """
        sizes, page_size = self.sizes, self._page_size
        num_tokens = sum(row.num_tokens for row in rows)
        used = [-(-(row.context + row.num_tokens) // page_size) for row in rows]
        widest = max(used, default=0)
        tiles = self._tiles(rows)
        if (
            len(rows) > sizes.rows
            or num_tokens > sizes.tokens
            or widest > sizes.pages
            or len(tiles) > sizes.tiles
        ):
            raise LockstepError(
                f"a step has {len(rows)} rows, {num_tokens} tokens, {len(tiles)} tiles and up to "
                f"{widest} pages a row, but its tables hold {sizes}: it needs a larger bucket"
            )
        table = torch.empty(self._pages_at + sizes.rows * widest, dtype=torch.int32)
        if self._page_locked:  # the allocator of pinned memory keeps it until the copy is over
            table = table.pin_memory()
        host = table.numpy()
        lengths, starts, slots, places = (
            host[at : at + n]
            for at, n in zip(
                self._firsts,
                (sizes.rows, sizes.rows + 1, sizes.tokens, 2 * sizes.tiles),
                strict=True,
            )
        )
        pages_BW = host[self._pages_at :].reshape(widest, sizes.rows).T
        slots[num_tokens:] = -1
        places[:] = -1
        if tiles:
            places.reshape(-1, 2)[: len(tiles)] = tiles
        token = 0
        for at, row in enumerate(rows):
            pages = np.array(row.pages[: used[at]], np.int32)
            assert len(pages) == used[at], (
                f"a row of {row.context + row.num_tokens} tokens has {len(pages)} pages of "
                f"{page_size}"
            )
            pages_BW[at, : used[at]] = pages
            lengths[at] = row.context + row.num_tokens
            starts[at] = token
            positions = np.arange(row.context, row.context + row.num_tokens)
            slots[token : token + row.num_tokens] = (
                pages[positions // page_size] * page_size + positions % page_size
            )
            token += row.num_tokens
        lengths[len(rows) :] = 0
        # Padding rows have a token each as far as there are any, which thus comes out as zeros.
        padding = token + np.arange(sizes.rows + 1 - len(rows))
        starts[len(rows) :] = np.minimum(padding, sizes.tokens)
        self._device[: len(table)].copy_(table, non_blocking=True)
        return self.plan

    def _tiles(self, rows: Sequence[AttentionRow]) -> list[tuple[int, int]]:
        """(row, first token) of each tile, a row's longest first."""
        tiles: list[tuple[int, int]] = []
        token = 0
        for at, row in enumerate(rows):
            assert row.num_tokens > 0, "a row of a step has at least one token"
            if row.num_tokens > 1:
                firsts = range(token, token + row.num_tokens, self._tile_queries)
                tiles += [(at, first) for first in reversed(firsts)]
            token += row.num_tokens
        return tiles


class PagedPlanner:
    """Makes plans for layers of one shape (windows, scales and caps may differ)."""

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
        *,
        invariant: bool = False,
    ) -> None:
        group = shape.num_heads // shape.num_kv_heads
        self.tile_queries = prefill_sizes(group, shape.head_dim, dtype.itemsize).tile_queries
        self._page_size = page_size
        self._device = device
        self._invariant = invariant

    def buffer(self, sizes: PlanSizes) -> PlanBuffer:
        """Tables for a graph to capture."""
        return PlanBuffer(
            sizes, self._page_size, self.tile_queries, self._device, invariant=self._invariant
        )

    def decode_buffer(self, rows: int, pages: int) -> PlanBuffer:
        """A buffer for steps of up to ``rows`` rows of one token, each of up to ``pages`` pages."""
        return self.buffer(PlanSizes.decode(rows, pages))

    def mixed_buffer(self, rows: int, tokens: int, pages: int) -> PlanBuffer:
        """A buffer for steps of up to ``rows`` rows and ``tokens`` tokens in all."""
        return self.buffer(PlanSizes.mixed(rows, tokens, pages, self.tile_queries))

    def plan(self, rows: Sequence[AttentionRow]) -> PagedPlan:
        """Tables of a step's own, just as large as its rows need."""
        sizes = PlanSizes(
            len(rows),
            sum(row.num_tokens for row in rows),
            max(-(-(row.context + row.num_tokens) // self._page_size) for row in rows),
            sum(-(-row.num_tokens // self.tile_queries) for row in rows if row.num_tokens > 1),
        )
        buffer = PlanBuffer(
            sizes,
            self._page_size,
            self.tile_queries,
            self._device,
            decodes=any(row.num_tokens == 1 for row in rows),
            exact=True,
            invariant=self._invariant,
        )
        return buffer.fill(rows)
