"""One adapter as a rank holds it in host memory: laid out like one device slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:
    import torch


class ReplacedRows(NamedTuple):
    """Replaced rows of this rank's part of an embedding or a head.

    ``ids`` [rows] are ascending and counted from the part's first; ``weight`` [rows, hidden] is
    what they have under the adapter.
    """

    ids: torch.Tensor
    weight: torch.Tensor


class ReplacedNorms(NamedTuple):
    """``weight`` [layers, size] of a norm over its stack; only ``layers`` of it are replaced."""

    layers: tuple[int, ...]
    weight: torch.Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class LoadedAdapter:
    """Immutable once built: readers make it, installs copy from it, nobody writes it.

    ``a[target]`` is [layers, slices * max_rank, in], ``b[target]`` [layers, out, max_rank], both in
    the slots' dtype and this rank's shard, ranks padded with zeros; an embedding's ``a`` is
    [1, ids, max_rank], a row a token. The scaling is folded into ``b`` and ``bias[target]``
    [layers, out] in float32 before the one cast; ``scaling`` (module -> number) is informational.
    What the adapter leaves alone is absent.
    """

    key: AdapterKey
    digest: str
    lora_rank: int
    scaling: dict[str, float]
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    bias: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, ReplacedRows] = field(default_factory=dict)
    norms: dict[str, ReplacedNorms] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        tables = (*self.a.values(), *self.b.values(), *self.bias.values())
        rows = (tensor for part in self.rows.values() for tensor in part)
        norms = (part.weight for part in self.norms.values())
        return sum(t.nbytes for t in (*tables, *rows, *norms))
