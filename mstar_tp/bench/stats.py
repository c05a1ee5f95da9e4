"""The figures of one run of a load.

output_tok_s   completion tokens of all good requests / wall time of the run
ttft_ms        from sending a request to its first streamed piece of output
itl_ms         gaps between the streamed pieces of one request, all requests pooled
tpot_ms        (last piece - first piece) / (tokens - 1), one value a request
digest         hash of all output texts by request number: equal for equal greedy outputs
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mstar_tp.bench.load import Load, Outcome


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of ``values`` lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in milliseconds; None for no values."""
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    if not seconds:
        return dict.fromkeys(shares)
    return {name: round(1e3 * percentile(seconds, share), 3) for name, share in shares.items()}


def run_stats(load: Load, outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """The figures of one run as plain JSON values."""
    good = [o for o in outcomes if o.error is None]
    bad = [o for o in outcomes if o.error is not None]
    gaps = [later - earlier for o in good for earlier, later in itertools.pairwise(o.pieces_s)]
    per_token = [(o.pieces_s[-1] - o.pieces_s[0]) / (o.tokens - 1) for o in good if o.tokens > 1]
    texts = "\0".join(o.text for o in outcomes)
    stats: dict[str, Any] = {
        "load": asdict(load),
        "wall_s": round(wall_s, 4),
        "output_tokens": sum(o.tokens for o in good),
        "output_tok_s": round(sum(o.tokens for o in good) / wall_s, 2),
        "requests_s": round(len(good) / wall_s, 3),
        "ttft_ms": spread_ms([o.pieces_s[0] - o.sent_s for o in good]),
        "itl_ms": spread_ms(gaps),
        "tpot_ms": spread_ms(per_token),
        "e2e_ms": spread_ms([o.pieces_s[-1] - o.sent_s for o in good]),
        "errors": len(bad),
        "digest": hashlib.sha256(texts.encode()).hexdigest()[:16],
    }
    seen = sorted({o.prompt_tokens for o in good if o.prompt_tokens is not None})
    if seen and seen != [load.prompt_tokens]:
        stats["prompt_tokens_seen"] = (
            seen  # the server added or merged tokens: rates compare unequal work
        )
    if bad:
        stats["first_error"] = bad[0].error
    return stats
