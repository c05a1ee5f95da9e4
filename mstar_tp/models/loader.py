"""Building a rank's part of a model from its folder.

The model is built without weights; each module then reads its own slices, under keys made of its
parent's path and its slices' names, and is packed before the next one is read. So a rank never
holds more than its part plus one tensor. A key of the checkpoint that nothing took is an error, as
is a module whose key is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from mstar_tp.common.errors import CheckpointError
from mstar_tp.common.problems import Problems
from mstar_tp.distributed.comm import CommGroup
from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.layers.weights import Loadable, MatrixPart, Packable, Placement, WeightReader
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.checkpoint import Checkpoint, CheckpointHeaders
from mstar_tp.models.config.families import ModelConfig
from mstar_tp.models.registry import MODELS, rules_of

Progress = Callable[[int, int], None]

MAX_SHOWN = 50
"""Keys without a place that a survey names."""


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16", "float16"], config: ModelConfig
) -> torch.dtype:
    """The dtype to serve in: as named, or the checkpoint's own for "auto"."""
    dtype = getattr(torch, config.dtype if name == "auto" else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_model(
    folder: str | Path,
    config: ModelConfig,
    group: CommGroup,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    max_position: int | None = None,
) -> CausalLM:
    """This rank's part of the model, filled and packed, in eval mode.

    Blocks on the disk; no collective.

    ``max_position`` bounds the rotary tables (default: the model's own limit). ``progress`` is
    called with (modules filled, modules) after each.

    Raises:
        CheckpointError: a file, key, shape or dtype is not what config.json needs; the message
            names it.
        ConfigError: heads or features cannot be dealt to this many ranks.
    """
    place = Placement(group=group, dtype=dtype, device=device)
    build = MODELS[config.architecture]
    model = build(config, place, max_position or config.max_position).eval()
    spelling = rules_of(config.architecture).own
    with Checkpoint(folder, spelling) as checkpoint, torch.no_grad():
        fill_model(model, checkpoint, progress)
        _refuse_untaken(checkpoint, config)
    return model


def plan_model(
    config: ModelConfig, group: CommGroup, dtype: torch.dtype, *, max_position: int | None = None
) -> CausalLM:
    """A rank's part of the model on the meta device: every size and no values. Reads nothing.

    Raises:
        ConfigError: heads or features cannot be dealt to this many ranks.
    """
    place = Placement(group=group, dtype=dtype, device=torch.device("meta"))
    build = MODELS[config.architecture]
    model = build(config, place, max_position or config.max_position).eval()
    with torch.no_grad():
        fill_model(model, _NoValues())
    return model


def survey_weights(folder: str | Path, model: CausalLM, problems: Problems) -> None:
    """Validate the headers of a model folder's weight files against a planned model of one rank.

    Every key that is missing, of another shape or without a place is added to ``problems``.
    """
    config = model.config
    spelling = rules_of(config.architecture).own
    with problems, CheckpointHeaders(folder, spelling, problems) as headers:
        with torch.no_grad():
            fill_model(model, headers)
        with problems:
            _refuse_untaken(headers, config, shown=MAX_SHOWN)


class _NoValues:
    """A checkpoint that has whatever is asked for, and hands out no values."""

    def has(self, key: str) -> bool:
        return False  # what a model takes if it is there, it can do without

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        pass

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        pass

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        pass


def _refuse_untaken(checkpoint: Checkpoint, config: ModelConfig, shown: int = 3) -> None:
    left = checkpoint.untaken()
    if left:
        more = f" and {len(left) - shown} more" if len(left) > shown else ""
        raise CheckpointError(
            f"{checkpoint.folder}: holds {', '.join(map(repr, left[:shown]))}{more}, which "
            f"{config.architecture} with this config.json has no place for: without them it would "
            "say something else"
        )


def fill_model(model: nn.Module, reader: WeightReader, progress: Progress | None = None) -> None:
    """Fill and pack every module of ``model`` that owns weights.

    Packing holds a weight twice for a moment, so the largest, those along the vocabulary, go first,
    while little else is held. A tied head keeps the copy, so it goes last. The rest follow in the
    model's order.
    """
    owners = [(path, m) for path, m in model.named_modules() if isinstance(m, Loadable)]
    owners.sort(key=lambda owner: not _goes_first(owner[1]))
    stray = [name for name, _ in model.named_parameters()]
    assert not stray, f"no module loads {stray}"
    for done, (path, module) in enumerate(owners, start=1):
        module.load(reader, path.rpartition(".")[0])
        if isinstance(module, Packable):
            module.pack()
        _give_memory_back()
        if progress is not None:
            progress(done, len(owners))


def _goes_first(module: object) -> bool:
    if isinstance(module, ParallelHead):
        return not module.is_tied
    return isinstance(module, VocabParallelEmbedding)


def _give_memory_back() -> None:
    """Return what was freed to the system.

    glibc keeps freed blocks of tens of megabytes for later: over a model's layers, sixty megabytes
    and more that nobody uses. Other C libraries have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
