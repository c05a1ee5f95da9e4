"""One adapter as a rank holds it in host memory: laid out like one device slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_tp.wire.messages import AdapterKey

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class LoadedAdapter:
    """Immutable once built: readers make it, installs copy from it, nobody writes it.

    ``a[target]`` is [layers, slices * max_rank, in], ``b[target]`` [layers, out, max_rank], both in
    the slots' dtype and this rank's shard, ranks padded with zeros. The scaling is folded into
    ``b`` in float32 before the one cast; ``scaling`` (module -> number) is informational. A target
    the adapter leaves alone is absent.
    """

    key: AdapterKey
    digest: str
    rank: int
    scaling: dict[str, float]
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.a.values(), *self.b.values()))
