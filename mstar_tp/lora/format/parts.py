"""The parts of an adapter: pairs of factors, replaced rows, copies of base weights. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mstar_tp.common.errors import AdapterError
from mstar_tp.lora.format.adapter_files import StoredTensor
from mstar_tp.lora.format.keys import Key
from mstar_tp.lora.format.peft_config import PeftConfig
from mstar_tp.lora.format.placing import ModulePlace
from mstar_tp.lora.spec import LoraTarget

FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """One adapted module: its tensors (full, unsharded, unscaled) and where its delta goes.

    ``a`` is [rank, in] and ``b`` [out, rank], of which consecutive blocks of rows belong to the
    place's slices. ``swapped``: they are an embedding's factors that a head shares, so B's
    transpose is the A and A's the B. Of an embedding, ``a`` has a column a token id. ``bias`` [out]
    is scaled as B is.
    """

    name: str
    """The name that the base checkpoint has for it, whatever prefix the file uses."""
    place: ModulePlace
    lora_rank: int
    scaling: float
    a: StoredTensor
    b: StoredTensor
    bias: StoredTensor | None = None
    swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """Rows of an embedding's or a head's weight that the adapter replaces.

    ``tensor`` [ids, hidden] holds the rows of ``ids``, in that order.
    """

    name: str
    target: LoraTarget
    tensor: StoredTensor
    ids: Sequence[int]


class SavedNorm(NamedTuple):
    """A norm's weight [size] that the adapter replaces."""

    name: str
    target: LoraTarget
    layer: int
    tensor: StoredTensor


class BaseCopy(NamedTuple):
    """A copy of a base tensor in the file.

    It has no effect if it is equal to the base model's ``name``; else the adapter was made for
    another model.
    """

    name: str
    tensor: StoredTensor


@dataclass(slots=True)
class AdapterParts:
    """The parts that an adapter's tensors come to."""

    modules: tuple[AdapterModule, ...] = ()
    saved: tuple[SavedRows, ...] = ()
    norms: tuple[SavedNorm, ...] = ()
    copies: tuple[BaseCopy, ...] = ()
    notes: tuple[str, ...] = ()
    config: PeftConfig | None = None
    """PEFT's settings, where it has any."""
    spellings: tuple[str, ...] = ()
    """The spellings of its keys."""


class Part(NamedTuple):
    """One tensor with the module it belongs to."""

    key: Key
    tensor: StoredTensor
    place: ModulePlace
    parameters: tuple[str, ...] = ()
    """The names that PEFT may have for the parameter, if ``target_parameters`` names it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that PEFT's settings may have for the module.

        One is the file's, which is PEFT's own name behind PEFT's prefix; without that prefix the
        model's is another.
        """
        if self.parameters:
            return self.parameters
        name = self.key.module.removeprefix("base_model.model.")
        return (name,) if name != self.key.module else (name, self.place.name)


def check_shape(where: str, part: Part, wanted: tuple[int, ...], why: str = "") -> None:
    """The tensor has this shape and a dtype that is served.

    Raises:
        AdapterError: it has not; the message says what it has.
    """
    info = part.tensor.info
    if info.shape != wanted:
        raise AdapterError(
            f"{where}: {part.key.text}: {part.place.name} {part.key.role.value} is "
            f"{list(info.shape)}, wanted {list(wanted)}{why}"
        )
    if info.dtype not in FLOAT_DTYPES:
        raise AdapterError(
            f"{where}: {part.key.text} is {info.dtype}, wanted one of {', '.join(FLOAT_DTYPES)}: "
            "save the adapter in one of them"
        )
