"""Capturing at start: all ranks or none, and replay held against eager before anybody is served.

Collective on the whole block, on the thread that starts the rank. What may differ between ranks,
whether a capture came about and whether a replay says what eager says, is agreed before anyone goes
on: where one rank cannot, all run eagerly.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext

import torch

from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.graphs.buckets import Choice, GraphKey, Kind, Variant
from mstar_tp.engine.graphs.forwards import CapturedForwards, CapturedStep
from mstar_tp.layers.attention.attention import AttentionRow

logger = logging.getLogger(__name__)

_SEED = 7


def capture_all(forwards: CapturedForwards, groups: JointGroups, num_pages: int) -> bool:
    """Capture every graph and validate it; whether steps may replay them.

    The same answer on every rank. Collective.

    ``num_pages``: KV pages that nobody holds yet, whose contents a validation may change.
    """
    began = time.monotonic()
    for key in forwards.sizes.keys(forwards.with_deltas):
        forwards.clear(key)
        # Kernels are compiled and libraries set up by running once: no capture could do that.
        with torch.inference_mode():
            forwards.run_eagerly(key, None, 0)
        cause = None
        try:
            forwards.graphs[key] = forwards.capture(key)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
        if not _all_could(groups, cause, f"capture the graph {key}"):
            return False
    if not post_warmup_validate(forwards, groups, num_pages):
        return False
    count, seconds = len(forwards.graphs), time.monotonic() - began
    logger.info("captured %d graphs in %.1f s", count, seconds)
    return True


def post_warmup_validate(forwards: CapturedForwards, groups: JointGroups, num_pages: int) -> bool:
    """Return whether each graph's replay of a probe equals the eager forward, on every rank.

    It is compared bit for bit, padding included. Collective.
    """
    wrong = None
    lora = forwards.lora
    with nullcontext() if lora is None else lora.decoder.weights.filled(_SEED):
        for key in forwards.graphs:
            if not _equals_eager(forwards, key, num_pages) and wrong is None:
                wrong = f"its replay of {key} differs from the eager forward"
            forwards.clear(key)
    return _all_could(groups, wrong, "validate its graphs")


def _all_could(groups: JointGroups, cause: str | None, what: str) -> bool:
    """Return whether no rank has a cause.

    Collective.
    """
    rank, world_size = groups.tp.rank, groups.tp.world_size
    (first,) = groups.agree([world_size if cause is None else rank])
    if cause is not None:
        logger.warning("rank %d could not %s, so all ranks run eagerly: %s", rank, what, cause)
    elif first < world_size:
        logger.warning(
            "rank %d could not %s, so all ranks run eagerly; its own log says why", first, what
        )
    return first == world_size


@torch.inference_mode()
def _equals_eager(forwards: CapturedForwards, key: GraphKey, num_pages: int) -> bool:
    """Return whether replay and eager say the same of a probe that leaves some padding.

    Collective.
    """
    step = _lay_out_probe(forwards, key, num_pages)
    count = step.num_tokens
    replayed = [None if x is None else x[:count].clone() for x in forwards.replay(step)]
    eager = forwards.run_eagerly(key, step.context, count)
    return all(
        (mine is None and other is None)
        or (mine is not None and other is not None and torch.equal(mine, other[:count]))
        for mine, other in zip(replayed, eager, strict=True)
    )


def _lay_out_probe(forwards: CapturedForwards, key: GraphKey, num_pages: int) -> CapturedStep:
    """Lay out rows of one token in pages of their own.

    Each is behind as many tokens of zeros as a page holds besides; every other row is on a slot,
    all slots in turn.
    """
    model, tables = forwards.model, forwards.tables[key.kind, key.size]
    count = min(num_pages, key.size if key.size == 1 else key.size - 1)
    context_len = forwards.probe_len - 1
    for cache in model.kv:
        cache.k[:count].zero_()
        cache.v[:count].zero_()
    rows = [AttentionRow(1, context_len, (page,)) for page in range(count)]
    vocab = model.module.config.vocab_size
    ids = [(7 * i + 3) % vocab for i in range(count)]
    forwards.inputs.write(key.size, ids, [context_len] * count)
    if key.variant is Variant.DELTAS and tables.tiles is not None and forwards.lora is not None:
        slots = forwards.lora.decoder.spec.slots
        rows_of: dict[int, list[int]] = {}
        for row in range(0, count, 2):
            rows_of.setdefault(row // 2 % slots + 1, []).append(row)
        tables.tiles.fill(rows_of)
    context = None
    if key.kind is Kind.PIECES:
        context = model.plan(rows)
    elif tables.attention is not None:
        tables.attention.fill(rows)
    return CapturedStep(Choice(key, key.size - count), count, context)
