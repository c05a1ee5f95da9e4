"""A base model's weight files: which file holds which key, and reading parts of them.

Single ``model.safetensors`` or the shards that ``model.safetensors.index.json`` names. Every key
that was read is marked, so that the loader can say which were not. Used by one thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from mstar_tp.common.errors import CheckpointError
from mstar_tp.common.problems import Problems
from mstar_tp.layers.weights import MatrixPart
from mstar_tp.models.config.config_keys import Keys, read_json
from mstar_tp.tensor_files.reader import TensorFile, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = ("F32", "F16", "BF16", "F64")

NO_EFFECT = (
    # Saved by old transformers; computed from config.json today, so they change nothing.
    re.compile(r"(^|\.)rotary_emb\.inv_freq$"),
    re.compile(r"^vision_tower\.embeddings\.position_ids$"),
    # Of a tower's last output, which no model here reads: they take an inner layer's.
    re.compile(r"^vision_tower\.post_layernorm\."),
)


class Checkpoint:
    """The open weight files of a model folder (a WeightReader). Close it, or use it as a context.

    Every method takes and gives keys in one spelling: ``canonical`` turns a stored key into it.

    Raises:
        CheckpointError: at construction, when a file is missing, damaged or no safetensors file, or
            index and shards disagree; the message names the file and the key. Past the limit of
            ``problems``.
    """

    def __init__(
        self,
        folder: str | Path,
        canonical: Callable[[str], str] = str,
        problems: Problems | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._problems = Problems() if problems is None else problems
        self._canonical = canonical
        self._files: dict[str, TensorFile] = {}
        self._home: dict[str, TensorFile] = {}
        self._stored: dict[str, str] = {}
        """Key -> how its file spells it."""
        self._taken: set[str] = set()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. May be called twice."""
        for file in self._files.values():
            file.close()

    def has(self, key: str) -> bool:
        """Tell whether some file holds ``key``."""
        return key in self._home

    def info(self, key: str) -> TensorInfo:
        """The header's entry of ``key``, which must be there."""
        return self._home[key].info(self._stored[key])

    def locate(self, key: str) -> tuple[TensorFile, str]:
        """(the open file that holds ``key``, which must be there; how it spells the key)."""
        return self._home[key], self._stored[key]

    def keys(self) -> tuple[str, ...]:
        """Every key of every file, in file order."""
        return tuple(self._home)

    def untaken(self) -> list[str]:
        """Keys that nothing read and that are not known to be without effect."""
        return [
            key
            for key in self._home
            if key not in self._taken and not any(rule.search(key) for rule in NO_EFFECT)
        ]

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        """Rows ``rows`` of ``key``, whose full shape must be ``shape``, into ``out``.

        Blocks on the disk.
        """
        self._take(key, shape).read_rows(self._stored[key], rows, out)

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        """Columns ``columns`` of ``key``, whose full shape must be ``shape``, into ``out``.

        Blocks on the disk.
        """
        self._take(key, shape).read_columns(self._stored[key], columns, out)

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        """Read ``part`` of matrix ``index`` of ``key`` into ``out``.

        The key's full shape must be ``shape``.

        Blocks on the disk.
        """
        file = self._take(key, shape)
        file.read_matrix(self._stored[key], index, part.rows, part.columns, out)

    def _take(self, key: str, shape: tuple[int, ...]) -> TensorFile:
        file = self._home.get(key)
        if file is None:
            raise CheckpointError(
                f"{self.folder}: no weight file holds {key!r}, which the architecture in "
                "config.json needs"
            )
        info = file.info(self._stored[key])
        if info.shape != shape:
            raise CheckpointError(
                f"{file.path}: {key!r} is {list(info.shape)}, wanted {list(shape)} by config.json: "
                "weights and config.json are of different models"
            )
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{file.path}: {key!r} is {info.dtype}, wanted one of {', '.join(_FLOATS)}: "
                "quantised weights are not "
                f"served, use the float checkpoint of this model"
            )
        self._taken.add(key)
        return file

    def _open(self) -> None:
        if (self.folder / SINGLE_FILE).exists():
            self._add_file(SINGLE_FILE)
        elif (self.folder / INDEX_FILE).exists():
            self._open_shards()
        else:
            raise CheckpointError(self._why_no_weights())

    def _open_shards(self) -> None:
        path = self.folder / INDEX_FILE
        places = Keys(read_json(path), str(path)).table("weight_map")
        broken: set[str] = set()
        for key in places.tree:
            with self._problems:
                self._open_shard_of(key, places, broken)
        for key, file in self._home.items():
            with self._problems:
                if self._stored[key] not in places.tree:
                    raise CheckpointError(
                        f"{file.path}: holds {key!r}, which {INDEX_FILE} does not list"
                    )
        if not self._files:
            with self._problems:
                if not broken:
                    raise CheckpointError(f"{path}: weight_map names no file")

    def _open_shard_of(self, key: str, places: Keys, broken: set[str]) -> None:
        """``broken``: the names of shards that could not be opened, each of them said once."""
        name = places.get(key)
        # A shard lies beside its index: a path that leads elsewhere is not followed.
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise places.refuse(key, "the name of a .safetensors file in the same folder")
        if name in broken:
            return
        if name not in self._files:
            broken.add(name)
            self._add_file(name)
            broken.discard(name)
        if self._home.get(self._canonical(key)) is not self._files[name]:
            raise CheckpointError(
                f"{self.folder / INDEX_FILE}: says {key!r} is in {name}, which does not hold it"
            )

    def _add_file(self, name: str) -> None:
        file = self._files[name] = TensorFile(self.folder / name)
        for stored in file.header:
            key = self._canonical(stored)
            if key in self._home:
                raise CheckpointError(
                    f"{file.path}: holds {stored!r}, which {self._home[key].path.name} holds too"
                )
            self._home[key] = file
            self._stored[key] = stored

    def _why_no_weights(self) -> str:
        if not self.folder.is_dir():
            return f"{self.folder}: no such folder: give the model's own folder"
        names = sorted(path.name for path in self.folder.iterdir())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            convert = (
                "from transformers import AutoModelForCausalLM as M; "
                f"M.from_pretrained('{self.folder}').save_pretrained('NEW_FOLDER')"
            )
            return (
                f"{self.folder / pickles[0]}: is a pickle, which can run code: convert the model "
                f'with `python -c "{convert}"`'
            )
        loose = [name for name in names if name.endswith(".safetensors")]
        found = f"; found {', '.join(loose)}" if loose else ""
        return f"{self.folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}"


class CheckpointHeaders(Checkpoint):
    """A checkpoint that validates all that a loader asks for from the headers alone.

    Nothing is read, and what is handed out keeps the values it has. ``problems`` takes what is
    wrong.
    """

    def __init__(
        self, folder: str | Path, canonical: Callable[[str], str], problems: Problems
    ) -> None:
        before = len(problems)
        super().__init__(folder, canonical, problems)
        self._is_whole = len(problems) == before
        self._validated: set[str] = set()

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        self._validate(key, shape)

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        self._validate(key, shape)

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        self._validate(key, shape)

    def _validate(self, key: str, shape: tuple[int, ...]) -> None:
        if key in self._validated or not (self.has(key) or self._is_whole):
            return  # said already, or it may be in a file that cannot be read
        self._validated.add(key)
        self._taken.add(key)  # wanted, whatever it is like
        with self._problems:
            self._take(key, shape)
