"""The part of a full dimension that a rank holds.

One function for base weights, adapters and their checks. No torch: the frontend and ``check``
use it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutSlice:
    """One part of a (possibly fused) linear's output, named as the checkpoint names its linear.

    The output is ``units`` equal blocks of rows (attention heads, or single rows for a plain
    linear). With ``units >= world_size`` each rank holds an equal run of blocks; with fewer, blocks
    are replicated: ``world_size / units`` neighbouring ranks hold the same one (grouped-query
    attention with fewer KV heads than ranks).
    """

    name: str
    out_features: int
    units: int

    def rows(self, rank: int, world_size: int) -> range:
        """The rows of the full output that ``rank`` holds.

        Raises:
            ConfigError: the blocks cannot be dealt evenly to ``world_size`` ranks.
        """
        return shard_range(self.out_features, self.units, rank, world_size, what=self.name)


def shard_range(size: int, units: int, rank: int, world_size: int, *, what: str) -> range:
    """The indices of a dimension of ``size`` (``units`` equal blocks) that ``rank`` holds.

    Raises:
        ConfigError: the blocks cannot be dealt, or replicated, evenly over ``world_size`` ranks.
    """
    assert size % units == 0, f"{what}: {size} is not {units} equal blocks"
    block = size // units
    if units >= world_size:
        if units % world_size:
            raise ConfigError(
                f"{what}: {units} blocks do not divide over {world_size} ranks: "
                f"choose --tensor-parallel-size from the divisors of {units}"
            )
        count = units // world_size * block
        return range(rank * count, (rank + 1) * count)
    if world_size % units:
        raise ConfigError(
            f"{what}: {units} blocks cannot be replicated evenly over {world_size} ranks: "
            f"choose --tensor-parallel-size as a multiple of {units}"
        )
    first = rank // (world_size // units) * block
    return range(first, first + block)


def vocab_part(vocab_size: int, rank: int, world_size: int) -> tuple[int, range]:
    """(ids a rank holds with padding, the real ones) of a vocabulary cut into equal parts."""
    size = -(-vocab_size // world_size)
    first = min(rank * size, vocab_size)
    return size, range(first, min(first + size, vocab_size))
