"""Attention over paged keys and values as torch operators, each one opaque node to torch.compile.

``torch.ops.mstar_attention.write`` and ``attend``. On CUDA they are Triton kernels; on CPU tensors
plain torch, a row at a time (for tests), or the Triton kernels where Triton interprets
(``TRITON_INTERPRET=1``). Both take the tables of a ``paged_plan``; no size of a launch depends on
what stands in them.

Legend: T tokens of the step, B rows, W pages a row, N tiles, X = heads * head size; caches
[pages, page_size, K, D], contiguous.
"""

from __future__ import annotations

import torch

from mstar_tp.lora.device.ops import interprets

_LIBRARY = torch.library.Library("mstar_attention", "DEF")
_LIBRARY.define(
    "write(Tensor(a!) cache_k, Tensor(b!) cache_v, Tensor k, Tensor v, Tensor slots) -> ()"
)
_LIBRARY.define(
    "attend(Tensor q, Tensor cache_k, Tensor cache_v, Tensor pages, Tensor lengths, Tensor starts, "
    "Tensor tiles, bool decodes, bool padded, int window, float scale, float softcap, "
    "bool invariant) -> Tensor"
)


def write(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k_TX: torch.Tensor,
    v_TX: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Each token's keys and values into its slot, int32; a token of a slot below 0 is padding."""
    if k_TX.is_cuda or interprets():
        from mstar_tp.kernels.triton.attention.paged_attention import launch_write

        launch_write(cache_k, cache_v, k_TX, v_TX, slots_T)
        return
    (tokens,) = (slots_T >= 0).nonzero(as_tuple=True)
    slots = slots_T[tokens].long()
    for cached, new in ((cache_k, k_TX), (cache_v, v_TX)):
        cached.view(-1, new.shape[1]).index_copy_(0, slots, new[tokens])


def attend(  # noqa: PLR0913, PLR0917 - an operator takes tensors and numbers only
    q_TX: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    pages_BW: torch.Tensor,
    lengths_B: torch.Tensor,
    starts: torch.Tensor,
    tiles_N2: torch.Tensor,
    decodes: bool,
    padded: bool,
    window: int,
    scale: float,
    softcap: float,
    invariant: bool,
) -> torch.Tensor:
    """Causal attention of each row's queries over its pages: [T, X].

    Row b's tokens are ``starts[b]`` to ``starts[b + 1]``, the last of its ``lengths[b]``; without
    any length it gives zeros. Rows of several tokens are cut into ``tiles``; ``decodes`` says
    whether there may be rows of one, ``padded`` whether tokens of no row, which give zeros. A
    ``window`` or ``softcap`` of 0 is none.
    """
    if not (q_TX.is_cuda or interprets()):
        tables = pages_BW, lengths_B, starts
        return reference_attend(q_TX, cache_k, cache_v, *tables, window, scale, softcap).to(
            q_TX.dtype
        )
    from mstar_tp.kernels.triton.attention.paged_attention import launch_decode, launch_prefill

    out_TX = q_TX.new_zeros(q_TX.shape) if padded else q_TX.new_empty(q_TX.shape)
    row = (out_TX, q_TX, cache_k, cache_v, pages_BW, lengths_B, starts)
    if decodes:
        launch_decode(*row, window, scale, softcap, invariant)
    if tiles_N2.shape[0]:
        launch_prefill(*row, tiles_N2, window, scale, softcap)
    return out_TX


def reference_attend(
    q_TX: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    pages_BW: torch.Tensor,
    lengths_B: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """``attend`` in float64, row by row, of tables on the CPU: the oracle. [T, X] float64."""
    _, page_size, kv_heads, dim = cache_k.shape
    out = torch.zeros(q_TX.shape, dtype=torch.float64)
    bounds = starts.tolist()
    for row, length in enumerate(lengths_B.tolist()):
        first, stop = bounds[row : row + 2]
        if not length:
            continue
        position = torch.arange(length)
        query = position[length - (stop - first) :, None]
        pages = pages_BW[row, : -(-length // page_size)].long()
        hidden = position > query
        if window:
            hidden |= position <= query - window
        low = int((~hidden).any(0).nonzero()[0])
        # What no query sees is not touched: it may have been given away.
        k, v = (x[pages].flatten(0, 1)[low:length].double() for x in (cache_k, cache_v))
        q = q_TX[first:stop].double().unflatten(-1, (kv_heads, -1, dim))
        scores = torch.einsum("nkgd,lkd->nkgl", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden[:, None, None, low:], float("-inf"))
        out[first:stop] = torch.einsum("nkgl,lkd->nkgd", scores.softmax(-1), v).flatten(1)
    return out


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("write", write, _device)
    _LIBRARY.impl("attend", attend, _device)


@torch.library.register_fake("mstar_attention::write", lib=_LIBRARY)
def _fake_write(*arguments: object) -> None:
    return None


@torch.library.register_fake("mstar_attention::attend", lib=_LIBRARY)
def _fake_attend(q: torch.Tensor, *arguments: object) -> torch.Tensor:
    return q.new_empty(q.shape)
