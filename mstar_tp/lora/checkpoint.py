"""Adapter folders: which file, which tensors, and where each goes. From the header alone; no torch.

Every key of the file is placed or the file is refused with the key's name: nothing that changes the
maths is skipped. One parser for serving, loading at run time and checking.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mstar_tp.errors import AdapterError
from mstar_tp.lora.peft_config import CONFIG_NAME, PeftConfig, read_peft_config
from mstar_tp.lora.spec import LoraSpec, SlicePlace
from mstar_tp.tensor_file import TensorFile, TensorInfo

WEIGHTS_NAME = "adapter_model.safetensors"
FLOAT_DTYPES = ("F32", "F16", "BF16")

_KEY = re.compile(r"(?P<module>.+)\.(?P<factor>lora_[AB])(?:\.(?P<name>[^.]+))?\.weight")
_SHARD = re.compile(r"adapter_model(\.safetensors\.index\.json|-.*\.safetensors)")
_INDEX = re.compile(r"0|[1-9][0-9]*")
_UNKNOWN_KEYS = (
    (r"hada_", "is a LoHa tensor; only plain LoRA can be served"),
    (r"lokr_", "is a LoKr tensor; only plain LoRA can be served"),
    (r"oft_", "is an OFT tensor; only plain LoRA can be served"),
    (r"vera_", "is a VeRA tensor; only plain LoRA can be served"),
    (r"ia3_", "is an IA3 tensor; only plain LoRA can be served"),
    (r"lora_magnitude|\.dora_scale$", "is a DoRA magnitude; only plain LoRA can be served"),
    (r"\.lora_[AB](\.[^.]+)?\.bias$", "is a bias inside LoRA (lora_bias), which cannot be served"),
    (r"lora_embedding_", "adapts an embedding, which cannot be served"),
    (r"\.lora_(down|up)\.|\.alpha$", f"is a Kohya key; wanted PEFT's names and an {CONFIG_NAME}"),
    (r"\.lora_E|\.ranknum", "is an AdaLoRA tensor; only plain LoRA can be served"),
    (r"\.base_layer\.weight$", "is a copy of a base weight; only LoRA tensors can be served"),
    (
        r"modules_to_save|\.(weight|bias)$",
        "is a whole tensor of a module (modules_to_save), no LoRA factor, and cannot be served",
    ),
    (r"", "is no LoRA tensor and cannot be served"),
)
"""Why a key that is no LoRA factor is refused: the first pattern found in it says."""


class FileIdentity(NamedTuple):
    """What tells a file from another one under its name."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """One adapted module: its two tensors (full, unsharded) and where its delta goes."""

    name: str
    """As the base checkpoint names it, whatever prefix the file uses."""
    place: SlicePlace
    rank: int
    scaling: float
    a_key: str
    b_key: str
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A checked adapter: its modules in the model's order, and the identity its file had when it
    was checked.
    """

    adapter: str
    weights: Path
    identity: FileIdentity
    header_hash: str
    modules: tuple[AdapterModule, ...]

    @property
    def rank(self) -> int:
        """The slot rank it needs: the largest of its modules'."""
        return max(module.rank for module in self.modules)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets it changes, sorted."""
        return tuple(sorted({module.place.target.name for module in self.modules}))


def check_adapter_file(spec: LoraSpec, name: str, path: str | Path) -> AdapterFile:
    """Fit of one adapter folder against the spec, from its config and header. Blocks on the disk.

    Raises:
        AdapterError: it cannot be served exactly; the message names the adapter, file and key.
    """
    try:
        folder = Path(path)
        weights = find_weights(folder)
        config = read_peft_config(folder)
        with TensorFile(weights, error=AdapterError) as file:
            identity = identify(weights)
            header = dict(file.header)
        modules = place_tensors(spec, header, config, where=str(weights))
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from None
    return AdapterFile(
        adapter=name,
        weights=weights,
        identity=identity,
        header_hash=header_hash(header),
        modules=modules,
    )


def find_weights(folder: Path) -> Path:
    """The one weights file of an adapter folder.

    Raises:
        AdapterError: there is none, or it is sharded or a pickle; none of those is opened.
    """
    if not folder.is_dir():
        raise AdapterError(
            f"{folder}: is no folder: wanted one with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    names = sorted(entry.name for entry in folder.iterdir())
    shards = [
        n
        for n in names
        if re.fullmatch(r"adapter_model(\.safetensors\.index\.json|-.*\.safetensors)", n)
    ]
    if shards:
        raise AdapterError(
            f"{folder}: {shards[-1]}: sharded adapter files cannot be served: save it as one "
            f"{WEIGHTS_NAME}"
        )
    if WEIGHTS_NAME in names:
        return folder / WEIGHTS_NAME
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        raise AdapterError(
            f"{folder}: {pickles[0]} is a pickle, which can run code, and was not opened: "
            "safetensors is required; "
            "load it with PEFT where you trust it and save_pretrained(..., safe_serialization=True)"
        )
    raise AdapterError(f"{folder}: has no {WEIGHTS_NAME}")


def identify(path: Path) -> FileIdentity:
    """The file's identity now."""
    entry = os.stat(path)
    return FileIdentity(entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns, entry.st_ino)


def header_hash(header: Mapping[str, TensorInfo]) -> str:
    """Hash of every tensor's name, dtype, shape and place in the file."""
    lines = [f"{n} {i.dtype} {i.shape} {i.start} {i.num_bytes}" for n, i in sorted(header.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Half(NamedTuple):
    key: str
    info: TensorInfo
    peft_name: str
    """The module as PEFT's patterns see it."""


def place_tensors(
    spec: LoraSpec, header: Mapping[str, TensorInfo], config: PeftConfig, *, where: str
) -> tuple[AdapterModule, ...]:
    """Every tensor of the file as a module of the spec, in the order of the spec's targets and
    layers.

    Raises:
        AdapterError: a key that nothing takes, half a pair, a misfit, or nothing at all.
    """
    halves: dict[SlicePlaceKey, dict[str, _Half]] = {}
    places: dict[SlicePlaceKey, SlicePlace] = {}
    names: set[str] = set()
    lookup = _Lookup(spec, where)
    for key, info in header.items():
        module, factor, name = _split(key, where)
        names.add(name)
        peft_name = module.removeprefix("base_model.model.")
        place = lookup.place(key, peft_name)
        identity = (place.target.name, place.layer, place.slice_index)
        pair = halves.setdefault(identity, {})
        if factor in pair:
            raise AdapterError(f"{where}: {key} and {pair[factor].key} both name one module")
        places[identity], pair[factor] = place, _Half(key, info, peft_name)
    if not halves:
        raise AdapterError(f"{where}: holds no LoRA tensors")
    if len(names) > 1:
        raise AdapterError(
            f"{where}: holds tensors of several adapters "
            f"({', '.join(sorted(n or 'unnamed' for n in names))}): "
            "save each in a folder of its own"
        )
    order = {target.name: index for index, target in enumerate(spec.targets)}
    ranked = sorted(halves, key=lambda i: (order[i[0]], i[1], i[2]))
    return tuple(_module(spec, places[i], halves[i], config, where) for i in ranked)


SlicePlaceKey = tuple[str, int, int]


def _split(key: str, where: str) -> tuple[str, str, str]:
    """(module, lora_A or lora_B, adapter name or "") of a key."""
    match = _KEY.fullmatch(key)
    if match is not None:
        return match["module"], match["factor"], match["name"] or ""
    raise AdapterError(f"{where}: {key}: {_why_unknown(key)}")


def _why_unknown(key: str) -> str:
    return next(why for pattern, why in _UNKNOWN_KEYS if re.search(pattern, key))


class _Lookup:
    """Module names of a file -> places in the spec."""

    def __init__(self, spec: LoraSpec, where: str) -> None:
        self._where = where
        self._places = spec.places()
        self._stacks = {
            alias: stack
            for stack in spec.layer_counts()
            for alias in (stack, stack.removeprefix("model."))
        }
        self._layers = spec.layer_counts()

    def place(self, key: str, module: str) -> SlicePlace:
        for alias, stack in self._stacks.items():
            if not module.startswith(f"{alias}."):
                continue
            index, _, path = module.removeprefix(f"{alias}.").partition(".")
            layer = self._layer(key, alias, stack, index)
            found = self._places.get((stack, path))
            if found is None:
                self._refuse_path(key, path)
            else:
                return SlicePlace(found[0], layer, found[1])
        raise AdapterError(
            f"{self._where}: {key}: adapts {module}, which is none of {self._known()}"
        )

    def _layer(self, key: str, alias: str, stack: str, index: str) -> int:
        count = self._layers[stack]
        if not _INDEX.fullmatch(index):
            raise AdapterError(f"{self._where}: {key}: {index!r} is no layer number of {alias}")
        if int(index) >= count:
            raise AdapterError(
                f"{self._where}: {key}: names {alias}.{index}, but the base model has {count} "
                "layers "
                f"(0 to {count - 1})"
            )
        return int(index)

    def _refuse_path(self, key: str, path: str) -> None:
        raise AdapterError(
            f"{self._where}: {key}: adapts {path} of a layer, which is none of {self._known()}"
        )

    def _known(self) -> str:
        return ", ".join(sorted(path for _, path in self._places))


def _module(
    spec: LoraSpec, place: SlicePlace, pair: dict[str, _Half], config: PeftConfig, where: str
) -> AdapterModule:
    target, name = place.target, place.target.module(place.layer, place.slice_index)
    for factor, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if factor not in pair:
            key = pair[other].key
            head, _, tail = key.rpartition(other)
            raise AdapterError(
                f"{where}: {key} has no counterpart: {head}{factor}{tail} is missing"
            )
    a, b = pair["lora_A"], pair["lora_B"]
    rank = config.rank_of(a.peft_name)
    out_features = target.out_slices[place.slice_index].out_features
    _check_half(a, (rank, target.in_features), f"{name} lora_A", where)
    _check_half(b, (out_features, rank), f"{name} lora_B", where)
    if rank > spec.max_rank:
        raise AdapterError(
            f"{where}: {name} has rank {rank}, wanted at most {spec.max_rank}: raise "
            "--max-lora-rank or drop the adapter"
        )
    return AdapterModule(
        name=name,
        place=place,
        rank=rank,
        scaling=config.scaling_of(a.peft_name),
        a_key=a.key,
        b_key=b.key,
        a=a.info,
        b=b.info,
    )


def _check_half(half: _Half, wanted: tuple[int, int], what: str, where: str) -> None:
    if half.info.dtype not in FLOAT_DTYPES:
        raise AdapterError(
            f"{where}: {half.key} is {half.info.dtype}, wanted one of {', '.join(FLOAT_DTYPES)}"
        )
    if half.info.shape != wanted:
        raise AdapterError(
            f"{where}: {half.key}: {what} is {list(half.info.shape)}, wanted {list(wanted)} (the "
            "rank is the "
            f"config's, the other size the base model's)"
        )
