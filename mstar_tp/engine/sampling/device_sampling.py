"""Choosing tokens without the host: the same draws as ``sampling``, in operations of the device.

The uniform number of a draw depends on seed and position, so the host knows it before the logits
are there. What a row asks for beyond temperature, top-k, top-p and min-p needs the host: see
``needs_host``. A token may differ from the host's only where two sums in another order tell apart
what is equal to the last bit of a float64, or where logits tie at the edge of top-k.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar_tp.engine.sampling.sampler import GREEDY_BELOW, is_penalised, uniform
from mstar_tp.engine.scheduling.requests import NO_TOKEN
from mstar_tp.kernels.staging import to_device
from mstar_tp.wire.values import SamplingParams


def needs_host(params: SamplingParams, num_output: int) -> bool:
    """Return whether a row with ``num_output`` tokens so far is sampled on the host.

    It is when it reports log probabilities, or when its logits are changed before, by what it
    sampled so far among others.
    """
    banned = num_output < params.min_tokens and bool(params.stop_token_ids)
    changed = banned or bool(params.logit_bias) or params.grammar is not None
    return changed or params.logprobs is not None or is_penalised(params)


def sample_on_device(
    logits_NV: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]
) -> torch.Tensor:
    """One token a row, int64 [N] on the logits' device, NO_TOKEN where they are not finite.

    Each row is its parameters and the position of the token. The host waits for nothing.
    """
    best_N = logits_NV.argmax(dim=-1)
    # argmax takes a NaN for the largest, so the best logit tells of any.
    finite_N = logits_NV.gather(1, best_N.unsqueeze(1)).isfinite().squeeze(1)
    tokens_N = best_N
    drawn = [i for i, (params, _) in enumerate(rows) if params.temperature >= GREEDY_BELOW]
    if len(drawn) == len(rows):
        tokens_N = _draw(logits_NV, rows)
    elif drawn:
        at = to_device(drawn, torch.int64, logits_NV.device)
        chosen = _draw(logits_NV.index_select(0, at), [rows[i] for i in drawn])
        tokens_N = best_N.index_copy(0, at, chosen)
    return torch.where(finite_N, tokens_N, NO_TOKEN)


def _draw(logits_NV: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> torch.Tensor:
    all_params = [params for params, _ in rows]
    row_parameters = [
        [params.temperature, params.top_p, params.min_p, uniform(params.seed, position)]
        for params, position in rows
    ]
    table = to_device(row_parameters, torch.float64, logits_NV.device)
    temperature, top_p, min_p, target = (column.unsqueeze(1) for column in table.unbind(1))
    logits_NV = logits_NV.double()
    best = logits_NV.amax(dim=-1, keepdim=True)
    probs_NV = torch.softmax((logits_NV - best) / temperature, dim=-1)
    size = probs_NV.shape[1]
    cuts = any(0 < params.top_k < size or params.top_p < 1 for params in all_params)
    if cuts:
        top_k = [params.top_k if 0 < params.top_k < size else size for params in all_params]
        most = to_device(top_k, torch.int64, probs_NV.device).unsqueeze(1)
        probs_NV = _keep_top(probs_NV, most, top_p)
    if any(params.min_p > 0 for params in all_params):
        least = min_p * probs_NV.amax(dim=-1, keepdim=True)
        probs_NV = torch.where(probs_NV >= least, probs_NV, 0.0)
    cumulative_NV = probs_NV.cumsum(dim=-1)
    wanted = target * cumulative_NV[:, -1:]
    index_N = torch.searchsorted(cumulative_NV, wanted, right=True).squeeze(1)
    places_V = torch.arange(size, device=probs_NV.device)
    last_N = torch.where(probs_NV > 0, places_V, -1).amax(dim=-1)
    return torch.minimum(index_N, last_N)


def _keep_top(probs_NV: torch.Tensor, most: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's ``most`` likeliest tokens, and of those the top-p set; zeros elsewhere.

    The top-p set is the smallest that comes to ``top_p`` of their sum.
    """
    ordered_NV, ids_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    places_V = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    ordered_NV = torch.where(places_V < most, ordered_NV, 0.0)
    before_NV = ordered_NV.cumsum(dim=-1) - ordered_NV
    enough = top_p * ordered_NV.sum(dim=-1, keepdim=True)
    kept_NV = torch.where((top_p >= 1) | (before_NV < enough), ordered_NV, 0.0)
    return torch.zeros_like(probs_NV).scatter_(1, ids_NV, kept_NV)
