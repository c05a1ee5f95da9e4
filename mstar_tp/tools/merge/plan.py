"""The change of each tensor of the base model, decided before anything is written. No torch.

An adapter's delta is what it adds to the base: a product of factors, a bias, or for replaced rows
their difference to the base's. The merged model is the base plus the weighted sum of the deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mstar_tp.common.errors import AdapterError, CheckpointError
from mstar_tp.lora.format.adapter_files import StoredTensor
from mstar_tp.lora.format.checkpoint import AdapterFile, AdapterModule
from mstar_tp.lora.format.saved_rows import embedding_of, tied_head
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.tensor_files.header import TensorInfo

_FLOATS = ("F32", "F16", "BF16", "F64")


class Product(NamedTuple):
    """Rows ``rows`` of B times A, times ``scale``: added to the base tensor's from ``first`` on.

    ``table``: the delta of an embedding, whose row i is B times column i of A. ``swapped``: that of
    a head that shares an embedding's factors, A's transpose times B's.
    """

    adapter: int
    a: StoredTensor
    b: StoredTensor
    rows: range
    scale: float
    first: int = 0
    table: bool = False
    swapped: bool = False


class Bias(NamedTuple):
    """Elements ``rows`` of a bias, times ``scale``."""

    adapter: int
    tensor: StoredTensor
    rows: range
    scale: float


class Replacement(NamedTuple):
    """The rows ``ids`` become ``weight`` times those of ``tensor`` and the rest of the base's."""

    adapter: int
    tensor: StoredTensor
    ids: Sequence[int]
    weight: float


Change = Product | Bias | Replacement


class WeightedAdapter(NamedTuple):
    """A checked adapter and the number that its delta is multiplied with."""

    file: AdapterFile
    weight: float


@dataclass(slots=True)
class MergePlan:
    """The changes of the base model.

    ``changes`` by the base tensor's key, in the adapters' order. ``untied``: (head's key,
    embedding's key) where the head gets a weight of its own, else None. ``stacked``: the tensors
    that hold a matrix an expert, whose rows count on from one expert to the next.
    """

    changes: dict[str, list[Change]] = field(default_factory=dict)
    stacked: set[str] = field(default_factory=set)
    untied: tuple[str, str] | None = None

    def add(self, key: str, change: Change) -> None:
        self.changes.setdefault(key, []).append(change)


class Base(NamedTuple):
    """The facts of the base model's files that the plan needs."""

    where: str
    tensors: Mapping[str, TensorInfo]


Equal = Callable[[int, StoredTensor, StoredTensor], bool]
"""A function that says if two tensors of an adapter (by number) hold the same values."""


def plan_merge(
    spec: LoraSpec, base: Base, adapters: Sequence[WeightedAdapter], equal: Equal
) -> MergePlan:
    """Every change of every adapter by the tensor it is made to.

    A head that is tied to the embedding and changed otherwise than it is untied, so that the merged
    model computes what the adapters compute.

    Raises:
        AdapterError: an adapter adds a bias where the base model has none.
        CheckpointError: the base model lacks a tensor or keeps it in another shape or no float.
    """
    plan = MergePlan()
    for number, (file, weight) in enumerate(adapters):
        for module in file.modules:
            _add_module(plan, base, file, number, module, weight)
        for rows in file.rows:
            plan.add(f"{rows.name}.weight", Replacement(number, rows.tensor, rows.ids, weight))
        for norm in file.norms:
            size = norm.target.in_features
            plan.add(f"{norm.name}.weight", Replacement(number, norm.tensor, range(size), weight))
    _settle_tied(plan, spec, base, equal)
    _check_base(plan, spec, base)
    return plan


def _add_module(
    plan: MergePlan,
    base: Base,
    file: AdapterFile,
    number: int,
    module: AdapterModule,
    weight: float,
) -> None:
    target, scale = module.place.target, module.scaling * weight
    start = 0
    for index in module.place.slices:
        name = target.module(module.place.layer, index)
        size = target.vocab_size if target.parallel.is_vocab else _size(target, index)
        rows = range(start, start + size)
        start += size
        key, first = _home(plan, base, module, index)
        plan.add(
            key,
            Product(
                number,
                module.a,
                module.b,
                rows,
                scale,
                first,
                table=target.parallel is LoraParallel.VOCAB_IN,
                swapped=module.swapped,
            ),
        )
        if module.bias is None:
            continue
        if f"{name}.bias" not in base.tensors:
            raise AdapterError(
                f"adapter {file.adapter!r}: {file.path}: {module.bias.key}: {name} of the base "
                "model has no bias that this one could be added to: serve the adapter unmerged"
            )
        plan.add(f"{name}.bias", Bias(number, module.bias, rows, scale))


def _home(plan: MergePlan, base: Base, module: AdapterModule, index: int) -> tuple[str, int]:
    """(key of the tensor that holds the weight of one slice, the row where it begins there)."""
    target, layer, _, _ = module.place
    key = f"{target.module(layer, index)}.weight"
    stacked = f"{target.stack}.{target.own_path}"
    if not target.routed or key in base.tensors or stacked not in base.tensors:
        return key, 0
    plan.stacked.add(stacked)
    before = sum(_size(target, i) for i in range(index))
    return stacked, layer * target.out_features + before


def _size(target: LoraTarget, index: int) -> int:
    return target.out_slices[index].out_features


def _settle_tied(plan: MergePlan, spec: LoraSpec, base: Base, equal: Equal) -> None:
    """Settle a weight that head and embedding share: change both alike, or part them."""
    head, embedding = tied_head(spec), embedding_of(spec)
    if head is None or embedding is None:
        return
    head_key, key = f"{head.module(0, 0)}.weight", f"{embedding.module(0, 0)}.weight"
    mine, theirs = plan.changes.get(head_key, []), plan.changes.get(key, [])
    alike = len(mine) == len(theirs) and all(
        _alike(one, other, equal) for one, other in zip(mine, theirs, strict=True)
    )
    if not alike:
        plan.untied = (head_key, key)
    elif head_key in base.tensors and theirs:
        plan.changes[head_key] = theirs
    else:
        plan.changes.pop(head_key, None)


def _alike(head: Change, embedding: Change, equal: Equal) -> bool:
    """True if a change of the head is that of the embedding it is tied to."""
    if head.adapter != embedding.adapter:
        return False
    if isinstance(head, Product) and isinstance(embedding, Product):
        same = (head.a, head.b, head.scale) == (embedding.b, embedding.a, embedding.scale)
        return head.swapped and same
    if isinstance(head, Replacement) and isinstance(embedding, Replacement):
        same = tuple(head.ids) == tuple(embedding.ids) and head.weight == embedding.weight
        return same and (
            head.tensor == embedding.tensor or equal(head.adapter, head.tensor, embedding.tensor)
        )
    return False


def _check_base(plan: MergePlan, spec: LoraSpec, base: Base) -> None:
    shapes = dict(_shapes(spec))
    for key in plan.changes:
        source = key
        if plan.untied is not None and key == plan.untied[0]:
            source = key if key in base.tensors else plan.untied[1]
        info = base.tensors.get(source)
        if info is None:
            raise CheckpointError(f"{base.where}: no weight file holds {source!r}")
        if info.shape != shapes[key]:
            raise CheckpointError(
                f"{base.where}: {source!r} is {list(info.shape)}, wanted {list(shapes[key])} by "
                "config.json: weights and config.json are of different models"
            )
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{base.where}: {source!r} is {info.dtype}, wanted one of {', '.join(_FLOATS)}: "
                "use the float checkpoint of this model"
            )


def _shapes(spec: LoraSpec) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Key and shape of every tensor that adapters may change."""
    for target in spec.targets:
        if target.routed:
            stacked = (target.num_layers, target.out_features, target.in_features)
            yield f"{target.stack}.{target.own_path}", stacked
        for layer in range(target.num_layers):
            for index, part in enumerate(target.out_slices):
                name = target.module(layer, index)
                if target.parallel is LoraParallel.NORM:
                    yield f"{name}.weight", (target.in_features,)
                    continue
                shape: tuple[int, ...] = (part.out_features, *target.base_shape)
                if target.parallel is LoraParallel.VOCAB_IN:
                    shape = shape[::-1]
                yield f"{name}.weight", shape
                yield f"{name}.bias", shape[:1]
