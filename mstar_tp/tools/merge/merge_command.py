"""``mstar-tp merge``: adapters added into a base model's weights, written as a model of its own.

Everything that can be refused is refused before the first byte is written: what the adapters are,
whether they fit, whether the disk has room. Then tensor after tensor is read by parts, merged in
float32 and written, so memory holds some parts and never a shard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mstar_tp.common.atomic_folder import FreshFolder
from mstar_tp.common.errors import AdapterError, CheckpointError
from mstar_tp.common.progress import ByteProgress
from mstar_tp.common.units import counted, in_bytes
from mstar_tp.engine.base_weights import CheckpointWeights
from mstar_tp.engine.offline_spec import offline_spec
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.base_weights import check_copy
from mstar_tp.models.checkpoint import Checkpoint
from mstar_tp.tensor_files.header import TensorInfo, torch_dtype
from mstar_tp.tensor_files.writer import TensorEntry, TensorWriter
from mstar_tp.tools.merge.apply import AdapterTensors, merged_rows, row_parts
from mstar_tp.tools.merge.output import (
    CONFIG_FILE,
    Shard,
    copy_files,
    other_files,
    pack_shards,
    write_config,
    write_index,
)
from mstar_tp.tools.merge.plan import Base, MergePlan, WeightedAdapter, plan_merge

COPY_BYTES = 16 << 20
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CASTS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """The merge that is wanted: the adapters, one of ``weights`` for each, and the new folder.

    ``dtype`` None: every tensor keeps its own.
    """

    model: Path
    adapters: tuple[Path, ...]
    weights: tuple[float, ...]
    out: Path
    dtype: str | None
    max_shard_bytes: int
    force: bool


def merge(options: MergeOptions) -> str:
    """Write the merged model; a sentence that says what was written. Blocks on the disk.

    Raises:
        CheckpointError: the base model cannot be read, or is none that is served.
        AdapterError: an adapter cannot be merged exactly; the message names file and key.
        OutputError: the result cannot be written.
    """
    fresh = FreshFolder(
        options.out,
        inputs=(options.model, *options.adapters),
        kind_file=CONFIG_FILE,
        force=options.force,
    )
    spec = offline_spec(options.model)
    adapters = [
        WeightedAdapter(check_adapter_file(spec, str(path), path), weight)
        for path, weight in zip(options.adapters, options.weights, strict=True)
    ]
    for file, _ in adapters:
        for note in file.notes:
            print(f"note: adapter {file.adapter!r}: {note}", file=sys.stderr)
    own = spec.module_map.own
    with Checkpoint(options.model, own) as checkpoint, AdapterTensors(adapters) as tensors:
        infos = {key: checkpoint.info(key) for key in checkpoint.keys()}
        base = Base(str(options.model), infos)
        plan = plan_merge(spec, base, adapters, tensors.equal)
        _check_copies(CheckpointWeights(options.model, own), adapters, tensors)
        tensors.check_finite()
        merger = _Merger(checkpoint, tensors, plan, options)
        return merger.run(fresh)


def _check_copies(
    weights: CheckpointWeights, adapters: Sequence[WeightedAdapter], tensors: AdapterTensors
) -> None:
    """Copies of base weights beside the factors must be this base model's."""
    for number, (file, _) in enumerate(adapters):
        for copy in file.copies:
            try:
                check_copy(copy, tensors.file(number, copy.tensor), weights, 0, 1)
            except AdapterError as error:
                raise AdapterError(f"adapter {file.adapter!r}: {error}") from None


class _Merger:
    """Writes what the plan says."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: AdapterTensors,
        plan: MergePlan,
        options: MergeOptions,
    ) -> None:
        self._checkpoint, self._tensors, self._plan = checkpoint, tensors, plan
        self._options = options
        self._sources = {key: key for key in checkpoint.keys()}
        """Key of the merged model -> key of the base model that it comes from."""
        self._names = {key: checkpoint.locate(key)[1] for key in checkpoint.keys()}
        """Key of the merged model -> how its files spell it."""
        if plan.untied is not None and plan.untied[0] not in self._sources:
            head, embedding = plan.untied
            self._sources[head], self._names[head] = embedding, head
        self._keys = {name: key for key, name in self._names.items()}

    def run(self, fresh: FreshFolder) -> str:
        shards = pack_shards(self._entries(), self._options.max_shard_bytes)
        model = self._options.model
        others = other_files(model)
        total = sum(entry.num_bytes for shard in shards for entry in shard.tensors.values())
        # The headers and the index are some hundred bytes a tensor.
        rest = sum(path.stat().st_size for path in others) + 500 * len(self._sources)
        fresh.check_space(total + rest)
        with fresh as folder, ByteProgress("merging:", total) as progress:
            for shard in shards:
                self._write_shard(folder, shard, progress)
            write_index(folder, shards)
            copy_files(model, others, folder)
            untied = self._plan.untied is not None
            write_config(model, folder, dtype=self._options.dtype, untied=untied)
            self._tensors.check_unchanged()
        return (
            f"wrote {fresh.path}: {in_bytes(total)} in {counted(len(shards), 'file')}, "
            f"{len(self._plan.changes)} of {counted(len(self._sources), 'tensor')} changed"
            + (", the head untied from the embedding" if untied else "")
        )

    def _entries(self) -> dict[str, TensorEntry]:
        dtype = self._options.dtype
        entries = {}
        for key in self._sources:
            info = self._info(key)
            cast = dtype is not None and info.dtype in _CASTS
            entries[self._names[key]] = TensorEntry(
                _CODES[dtype] if cast and dtype else info.dtype, info.shape
            )
        return entries

    def _write_shard(self, folder: Path, shard: Shard, progress: ByteProgress) -> None:
        with TensorWriter(folder / shard.name, shard.tensors) as writer:
            for name, entry in shard.tensors.items():
                key = self._keys[name]
                if key in self._plan.changes or entry.dtype != self._info(key).dtype:
                    self._merge(writer, key, entry, progress)
                else:
                    self._copy(writer, key, progress)

    def _info(self, key: str) -> TensorInfo:
        return self._checkpoint.info(self._sources[key])

    def _copy(self, writer: TensorWriter, key: str, progress: ByteProgress) -> None:
        source = self._sources[key]
        (file, stored), size = self._checkpoint.locate(source), self._info(key).num_bytes
        for first in range(0, size, COPY_BYTES):
            part = range(first, min(first + COPY_BYTES, size))
            writer.write(self._names[key], file.read_bytes(stored, part), first)
            progress.add(len(part))

    def _merge(
        self, writer: TensorWriter, key: str, entry: TensorEntry, progress: ByteProgress
    ) -> None:
        changes, dtype = self._plan.changes.get(key, []), torch_dtype(entry.dtype)
        done = 0
        for rows, before in self._parts(key):
            cast = merged_rows(before, rows, changes, self._tensors).to(dtype)
            if not cast.isfinite().all() and before.isfinite().all():
                raise CheckpointError(
                    f"{key} would hold values that are not finite as {entry.dtype}: choose another "
                    "--dtype, or smaller --weights"
                )
            writer.write(self._names[key], cast, done)
            progress.add(cast.nbytes)
            done += cast.nbytes

    def _parts(self, key: str) -> Iterator[tuple[range, torch.Tensor]]:
        """The base tensor, in order: some rows, and their values.

        Rows of stacked matrices count on from one to the next.
        """
        file, stored = self._checkpoint.locate(self._sources[key])
        info = self._info(key)
        if not info.shape:
            yield range(1), file.read(stored)
        elif key not in self._plan.stacked:
            for rows in row_parts(info.shape):
                yield rows, file.read_rows(stored, rows)
        else:
            count, height, width = info.shape
            for index in range(count):
                for rows in row_parts((height, width)):
                    part = torch.empty((len(rows), width), dtype=info.torch_dtype)
                    file.read_matrix(stored, index, rows, range(width), part)
                    first = index * height
                    yield range(first + rows.start, first + rows.stop), part
