"""A checked adapter: its tensors and where each goes. From the headers alone; no torch.

Every key of the files is placed, or known to be without effect and noted, or the adapter is refused
with the key's name: nothing that changes the maths is skipped. One parser for serving, loading at
run time and checking. ``assemble`` does the placing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.lora.format.adapter_files import FileIdentity, Headers, WeightsFile, read_headers
from mstar_tp.lora.format.assemble import assemble
from mstar_tp.lora.format.parts import AdapterModule, AdapterParts, BaseCopy, SavedNorm, SavedRows
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig, read_peft_config
from mstar_tp.lora.spec import LoraSpec

__all__ = [
    "AdapterFile",
    "AdapterModule",
    "BaseCopy",
    "SavedNorm",
    "SavedRows",
    "Survey",
    "check_adapter_file",
    "survey_adapter",
]

MAX_MESSAGE_CHARS = 2000
MAX_PROBLEMS = 200
"""Reasons against one adapter that a survey looks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A checked adapter: its parts in the model's order, and its files' identity at the check.

    ``notes`` are sentences an operator should read.
    """

    adapter: str
    files: tuple[WeightsFile, ...]
    modules: tuple[AdapterModule, ...]
    rows: tuple[SavedRows, ...] = ()
    norms: tuple[SavedNorm, ...] = ()
    copies: tuple[BaseCopy, ...] = ()
    notes: tuple[str, ...] = ()
    config: PeftConfig | None = field(default=None, compare=False)
    """PEFT's settings, where it has any."""
    spellings: tuple[str, ...] = ()
    """The spellings of its keys."""
    num_tensors: int = 0

    @property
    def path(self) -> Path:
        """The file, or the first of several."""
        return self.files[0].path

    @property
    def identity(self) -> tuple[FileIdentity, ...]:
        """The identity of each of its files."""
        return tuple(part.identity for part in self.files)

    @property
    def lora_rank(self) -> int:
        """The slot rank it needs: the largest of its modules'."""
        return max((module.lora_rank for module in self.modules), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets it changes, sorted."""
        names = {module.place.target.name for module in self.modules}
        names |= {saved.target.name for saved in self.rows}
        return tuple(sorted(names | {saved.target.name for saved in self.norms}))

    @property
    def biased(self) -> tuple[str, ...]:
        """Names of the targets that have a bias inside LoRA, sorted."""
        return tuple(sorted({m.place.target.name for m in self.modules if m.bias is not None}))

    @property
    def saved_ids(self) -> tuple[tuple[str, Sequence[int]], ...]:
        """(target, ids of the rows it replaces) of each target that has no factors but rows."""
        return tuple((saved.target.name, saved.ids) for saved in self.rows)


def check_adapter_file(
    spec: LoraSpec, name: str, path: str | Path, others: Sequence[LoraSpec] = ()
) -> AdapterFile:
    """Check that one adapter (a folder, or one safetensors file) fits the spec and ``others``.

    The check reads its config and headers. The result is this spec's part: empty where the adapter
    changes only other stages. Blocks on the disk.

    Raises:
        AdapterError: it cannot be served exactly; the message names the adapter, file and key.
    """
    survey = survey_adapter(lambda headers: spec, name, path, limit=1, others=others)
    if survey.refusals:
        raise AdapterError(survey.refusals[0])
    assert survey.file is not None
    return survey.file


class Survey(NamedTuple):
    """All that can be said about an adapter.

    With ``refusals`` (the first is what a rank would refuse it with), ``file`` holds what is right
    by itself, or is None where not even the headers can be read.
    """

    file: AdapterFile | None
    headers: Headers | None
    refusals: tuple[str, ...]


def survey_adapter(
    spec_of: Callable[[Headers], LoraSpec],
    name: str,
    path: str | Path,
    limit: int = MAX_PROBLEMS,
    others: Sequence[LoraSpec] = (),
) -> Survey:
    """Validate one adapter (a folder, or one safetensors file) from its config and headers.

    Up to ``limit`` reasons against it are collected. ``spec_of`` says what may be adapted, knowing
    the headers, and ``others`` what in the model's other stages. Blocks on the disk.
    """
    problems = Problems(limit)
    headers, parts, refusals = None, AdapterParts(), []
    try:
        with problems:
            headers = read_headers(Path(path), problems)
        if len(problems) == 0 and headers is not None:
            with problems:
                parts = assemble(spec_of(headers), headers, problems, others)
        elif (Path(path) / CONFIG_NAME).exists():
            with problems:
                read_peft_config(Path(path), problems)
    except AdapterError:
        pass  # the last that was wanted
    except OSError as error:
        refusals = [f"adapter {name!r}: {path}: {error.strerror}"]
    refusals = [f"adapter {name!r}: {readable(text)}" for text in problems.texts] + refusals
    if headers is None or not headers.files:
        return Survey(None, None, tuple(refusals))
    file = AdapterFile(
        adapter=name,
        files=headers.files,
        modules=parts.modules,
        rows=parts.saved,
        norms=parts.norms,
        copies=parts.copies,
        notes=tuple(readable(note) for note in parts.notes),
        config=parts.config,
        spellings=parts.spellings,
        num_tensors=len(headers.tensors),
    )
    return Survey(file, headers, tuple(refusals))


def readable(text: str) -> str:
    """The text as one short line that any log and any wire takes.

    Files name their keys as they like.
    """
    if len(text) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
