"""Softmax attention of one part's rows, given their keys and values. Chosen by measurement.

One query a row (decode): on a CPU float32 runs in plain batched products, up to twice as fast as
the fused kernel; bfloat16 runs in the fused kernel, which keeps its scores in float32; float16 has
no fast kernel of either kind, so it runs in float32. Several queries a row run in the fused kernel.

Legend: B rows, N queries a row, L keys a row, H query heads, K key/value heads, G query heads a
key head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from mstar_tp.layers.attention.torch_plan import AttentionPart

Read = Callable[[], torch.Tensor]
"""Keys or values of a part's rows: [B, K, L, D]."""


def score_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of masks for queries ``q``."""
    return torch.float32 if decodes_in_products(q) else q.dtype


def decodes_in_products(q: torch.Tensor) -> bool:
    """Tell whether rows of one query run in plain float32 products, with a mask [B*K, G, L]."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float16)


def attend(
    q_BNHD: torch.Tensor,
    keys: Read,
    values: Read,
    part: AttentionPart,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[B, N, H, D]: each query's mean of the values it sees, weighted by softmax of its scores.

    ``keys`` and ``values`` are read when needed, each once.
    """
    if softcap is not None:
        return _attend_capped(q_BNHD, keys(), values(), part, scale, softcap)
    if q_BNHD.shape[1] > 1:
        return _attend_many(q_BNHD, keys(), values(), part, scale)
    if decodes_in_products(q_BNHD):
        return _decode_in_products(q_BNHD, keys, values, part.mask, scale)
    # A key head's G queries stand as G positions of one head: its keys are not copied.
    k_BKLD = keys()
    q_BKGD = q_BNHD.view(part.num_rows, k_BKLD.shape[1], -1, q_BNHD.shape[-1])
    return F.scaled_dot_product_attention(q_BKGD, k_BKLD, values(), part.mask, scale=scale)


def _decode_in_products(
    q_BNHD: torch.Tensor, keys: Read, values: Read, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """N = 1, a matrix a key head of a row. M = B * K."""
    k_MLD = keys().flatten(0, 1).float()
    dim = k_MLD.shape[-1]
    q_MGD = q_BNHD.reshape(k_MLD.shape[0], -1, dim).float()
    if mask is None:
        scores_MGL = torch.bmm(q_MGD, k_MLD.transpose(1, 2)).mul_(scale)
    else:
        scores_MGL = torch.baddbmm(mask, q_MGD, k_MLD.transpose(1, 2), alpha=scale)
    # Values come in only now, into the memory the keys leave: that is still in the core's cache.
    del k_MLD
    v_MLD = values().flatten(0, 1).float()
    return torch.bmm(scores_MGL.softmax(-1), v_MLD).to(q_BNHD.dtype)


def _attend_many(
    q_BNHD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    part: AttentionPart,
    scale: float,
) -> torch.Tensor:
    out_BHND = F.scaled_dot_product_attention(
        q_BNHD.transpose(1, 2),
        k_BKLD,
        v_BKLD,
        None if part.mask is None else part.mask.to(q_BNHD.dtype),
        is_causal=part.causal,
        scale=scale,
        enable_gqa=q_BNHD.shape[2] != k_BKLD.shape[1],
    )
    return out_BHND.transpose(1, 2)


def _attend_capped(
    q_BNHD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    part: AttentionPart,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend in plain products: no fused kernel bends its scores."""
    rows, queries, heads, dim = q_BNHD.shape
    kv_heads = k_BKLD.shape[1]
    q_BKGND = q_BNHD.view(rows, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(q_BKGND, k_BKLD.unsqueeze(2).transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if part.mask is not None:
        scores = scores + part.mask.unsqueeze(1)
    elif part.causal:
        hidden_NL = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(hidden_NL, float("-inf"))
    weights = scores.softmax(-1).to(v_BKLD.dtype)
    out_BKGND = torch.matmul(weights, v_BKLD.unsqueeze(2))
    return out_BKGND.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, dim)
