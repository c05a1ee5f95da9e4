"""The leader's pool in the lockstep model: the product's, over tables in any state.

It is only asked; what changes is read out of its tables afterwards. It reads nothing by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from model_rank import Ranks

from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.tools.replay.fakes import NoWeights


class LeaderPool(LoraAdapterPool):
    """The product's pool over tables in any state. Refuted variants answer in their own way."""

    def __init__(self, ranks: Ranks) -> None:
        config = ranks.config
        spec = LoraSpec(
            targets=(),
            slots=config.slots,
            max_rank=1,
            cpu_capacity=max(config.capacity, config.slots),
            dtype="float32",
        )
        super().__init__(
            spec,
            device="cpu",
            groups=_Groups(_Group(0, config.ranks)),  # type: ignore[arg-type]
            dtype=None,  # type: ignore[arg-type]
            decides=True,
            report=lambda report: None,
            make_readers=lambda land: _NoReaders(),
            context=PoolContext(weights=NoWeights()),
        )
        self._variant = config.variant
        self._reads: tuple[tuple[int, str] | None, ...] = ()

    def over(self, tables: PoolTables, reads: Any) -> LeaderPool:
        """This pool with ``tables``, and how far the leader's own reads are."""
        self.tables = tables
        self._reads = reads
        if self._variant in ("no agreement", "admit before copies"):
            tables._adapter_state = self._own_state  # type: ignore[method-assign]
        return self

    def _own_state(self, key: Any) -> CopyState | AskFailed:
        read = self._reads[key]
        states = {"in": CopyState.IN, "failed": AskFailed("unreadable")}
        return states.get(read[1], CopyState.WAITING) if read is not None else CopyState.WAITING

    def reserve(self, rid: int) -> int | None:
        tables = self.tables
        key: Any = tables.cpu_cache.key_of(rid)
        if self._variant == "slots counted by rows":
            new, taken = 1, len({*tables.claims, *tables.assigned})
        else:
            return super().reserve(rid)
        if taken + new > self.spec.slots:
            return None
        tables.claims[rid] = key
        return new


class _Group(NamedTuple):
    rank: int
    world_size: int


class _Groups(NamedTuple):
    tp: _Group


class _NoReaders:
    """Nothing is read here: reads land as transitions of the model."""

    def start(self, *_: Any) -> None:
        raise AssertionError("the leader's pool of a model reads nothing")

    call = start

    def close(self) -> None:
        pass
