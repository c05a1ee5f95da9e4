"""Softmax attention of one part's rows, given their gathered keys and values.

Legend: B rows, N queries a row, L keys a row, H query heads, K key/value heads, G query heads a key head, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar_tp.layers.attention_plan import AttentionPart


def attend(
    q_BNHD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    part: AttentionPart,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[B, N, H, D]: each query's mean of the values it sees, weighted by softmax of its scores."""
    if softcap is not None:
        return _attend_capped(q_BNHD, k_BKLD, v_BKLD, part, scale, softcap)
    rows, queries, heads, dim = q_BNHD.shape
    kv_heads = k_BKLD.shape[1]
    if queries == 1:
        # The G queries of a key head stand as G positions of one head: no copy of the keys a query head.
        q_BKGD = q_BNHD.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, part.mask, scale=scale)
        return out
    out = F.scaled_dot_product_attention(
        q_BNHD.transpose(1, 2),
        k_BKLD,
        v_BKLD,
        part.mask,
        is_causal=part.causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2)


def _attend_capped(
    q_BNHD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    part: AttentionPart,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """As above in plain products: no fused kernel bends its scores."""
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
