"""Judging adapters one by one or by the thousand, side by side: headers alone, or every byte.

The validation is the serving code's own (``AdapterChecker``, the store's charge, ``read_adapter``).
Only for an adapter that it refuses is the same parser asked again for every other reason.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from mstar_tp.common.errors import AdapterError, MstarError
from mstar_tp.lora.format.adapter_files import Headers
from mstar_tp.lora.format.batch_checks import CHECK_THREADS, AdapterChecker
from mstar_tp.lora.format.checkpoint import AdapterFile, AdapterModule, Survey, survey_adapter
from mstar_tp.lora.format.keys import Spelling
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.tools.check.file_alone import spec_alone
from mstar_tp.tools.check.findings import AdapterFindings, TargetFindings
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

Progress = Callable[[int, int], None]


class Validator(Protocol):
    """The knowledge besides the file that an adapter is validated with."""

    def check(self, name: str, path: str) -> AdapterFile:
        """The rank's own check of its headers. Any thread.

        Raises:
            AdapterError: it cannot be served.
        """
        ...

    def survey(self, name: str, path: str) -> Survey:
        """Every reason against it. Any thread."""
        ...

    def host_bytes(self, file: AdapterFile) -> tuple[int, ...] | None:
        """Each rank's copy."""
        ...

    def read(self, key: AdapterKey, file: AdapterFile) -> str | None:
        """Read its bytes as ranks do; its digest, if there is one without a model. Any thread.

        Raises:
            AdapterError: they cannot be served.
        """
        ...


class FileValidator:
    """Validates a file by itself, without a model."""

    def __init__(self, *, max_rank: int, max_saved_rows: int) -> None:
        self._limits = LoraSpec(
            targets=(),
            slots=1,
            max_rank=max_rank,
            cpu_capacity=1,
            dtype="float32",
            max_saved_rows=max_saved_rows,
        )
        self._checker = AdapterChecker(self._limits, full=self._check)

    def check(self, name: str, path: str) -> AdapterFile:
        return self._checker.check(name, path)

    def _check(self, name: str, path: Path) -> AdapterFile:
        survey = survey_adapter(self._spec_of, name, path, limit=1)
        if survey.refusals or survey.file is None:
            raise AdapterError("\n".join(survey.refusals))
        return survey.file

    def survey(self, name: str, path: str) -> Survey:
        return survey_adapter(self._spec_of, name, path)

    def _spec_of(self, headers: Headers) -> LoraSpec:
        return spec_alone(headers, self._limits)

    def host_bytes(self, file: AdapterFile) -> tuple[int, ...] | None:
        return None

    def read(self, key: AdapterKey, file: AdapterFile) -> str | None:
        import torch

        from mstar_tp.common.problems import Problems
        from mstar_tp.lora.format.adapter_files import read_headers
        from mstar_tp.lora.reading.shards import read_adapter

        spec = self._spec_of(read_headers(file.files[0].path, Problems()))
        alone = replace(file, copies=())  # what they are copies of, nobody knows
        read_adapter(
            spec,
            key,
            alone,
            rank=0,
            world_size=1,
            dtype=torch.float32,
            page_locked=False,
            digest=None,
        )
        return None


def inspect_adapters(
    validator: Validator,
    adapters: Sequence[tuple[str, str]],
    *,
    digests: bool = False,
    progress: Progress = lambda done, total: None,
    threads: int = CHECK_THREADS,
) -> list[AdapterFindings]:
    """The findings on each (name, path), in order. ``progress(done, total)`` follows each."""
    inspector = _Inspector(validator, digests)
    found: list[AdapterFindings] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="inspect") as pool:
        for findings in pool.map(inspector.inspect, adapters):
            found.append(findings)
            progress(len(found), len(adapters))
    return found


class _Inspector:
    """Any thread; the lock guards what is remembered of the last recipe."""

    def __init__(self, validator: Validator, digests: bool) -> None:
        self._validator = validator
        self._digests = digests
        self._lock = threading.Lock()
        self._last: tuple[tuple[AdapterModule, ...], AdapterFindings] | None = None

    def inspect(self, adapter: tuple[str, str]) -> AdapterFindings:
        name, path = adapter
        try:
            file = self._validator.check(name, path)
        except AdapterError as error:
            return self._refused(name, path, str(error))
        findings = self._findings(file, name, path)
        if not self._digests:
            return findings
        try:
            digest = self._validator.read(AdapterKey(name, FIRST_GENERATION), file)
        except MstarError as error:
            return msgspec.structs.replace(findings, refusals=(str(error),), host_bytes=None)
        return msgspec.structs.replace(findings, digest=digest)

    def _refused(self, name: str, path: str, first: str) -> AdapterFindings:
        survey = self._validator.survey(name, path)
        # The first is what the rank says, whatever a second look finds.
        refusals = tuple(dict.fromkeys((first, *survey.refusals)))
        if survey.file is None:
            return AdapterFindings(name=name, path=path, refusals=refusals)
        findings = describe(survey, name, path)
        return msgspec.structs.replace(findings, refusals=refusals)

    def _findings(self, file: AdapterFile, name: str, path: str) -> AdapterFindings:
        """The facts of adapters that share a recipe; only names and sizes of files differ."""
        with self._lock:
            last = self._last
        if last is not None and last[0] is file.modules and not file.rows and not file.norms:
            return msgspec.structs.replace(
                last[1], name=name, path=path, file_bytes=_file_bytes(file)
            )
        findings = describe(Survey(file, None, ()), name, path)
        findings = msgspec.structs.replace(findings, host_bytes=self._validator.host_bytes(file))
        with self._lock:
            self._last = (file.modules, findings)
        return findings


def describe(survey: Survey, name: str, path: str) -> AdapterFindings:
    """An adapter's facts from what was placed, and from its headers where not all was."""
    file = survey.file
    assert file is not None
    if survey.headers is not None:
        dtypes = {tensor.info.dtype for tensor in survey.headers.tensors.values()}
    else:
        dtypes = _dtypes(file)
    alphas: tuple[float, ...] = ()
    if file.config is not None:
        alphas = tuple(sorted({m.scaling * _divisor(file, m.lora_rank) for m in file.modules}))
    return AdapterFindings(
        name=name,
        path=path,
        format=_format(file),
        files=len(file.files),
        file_bytes=_file_bytes(file),
        tensors=file.num_tensors,
        dtypes=tuple(sorted(dtypes)),
        ranks=tuple(sorted({module.lora_rank for module in file.modules})),
        alphas=tuple(round(alpha, 6) for alpha in alphas),
        scalings=tuple(sorted({module.scaling for module in file.modules})),
        targets=_targets(file),
        notes=file.notes,
    )


def _divisor(file: AdapterFile, rank: int) -> float:
    assert file.config is not None
    return math.sqrt(rank) if file.config.rslora else rank


def _format(file: AdapterFile) -> str | None:
    if not file.spellings:
        return None
    words = [word for word in file.spellings if word != Spelling.PEFT.value] or ["PEFT"]
    return " and ".join(words)


def _file_bytes(file: AdapterFile) -> int:
    return sum(part.identity.size for part in file.files)


def _dtypes(file: AdapterFile) -> set[str]:
    parts = [part for module in file.modules for part in (module.a, module.b, module.bias) if part]
    parts += [rows.tensor for rows in file.rows] + [norm.tensor for norm in file.norms]
    return {part.info.dtype for part in (*parts, *(copy.tensor for copy in file.copies))}


def _targets(file: AdapterFile) -> tuple[TargetFindings, ...]:
    adapted: dict[_Role, list[tuple[int | None, AdapterModule]]] = {}
    for module in file.modules:
        role, layer = _role(module.name)
        adapted.setdefault(role, []).append((layer, module))
    several = len({role.stack for role in adapted if role.stack}) > 1
    found = [
        TargetFindings(
            name=f"{role.stack}.*.{role.name}" if several and role.stack else role.name,
            layers=ranges([layer for layer, _ in modules if layer is not None]),
            num_modules=len(modules),
            ranks=tuple(sorted({module.lora_rank for _, module in modules})),
        )
        for role, modules in adapted.items()
    ]
    norms: dict[_Role, list[int | None]] = {}
    for norm in file.norms:
        role, layer = _role(norm.name)
        norms.setdefault(role, []).append(layer)
    found += [
        TargetFindings(
            name=f"{role.name}.weight",
            layers=ranges([layer for layer in layers if layer is not None]),
            num_modules=len(layers),
            ranks=(),
            kind="replaced",
        )
        for role, layers in norms.items()
    ]
    found += [
        TargetFindings(
            name=f"{len(rows.ids)} rows of {rows.name}",
            layers="",
            num_modules=1,
            ranks=(),
            kind="replaced",
        )
        for rows in file.rows
    ]
    return tuple(found)


class _Role(NamedTuple):
    stack: str
    name: str


def _role(module: str) -> tuple[_Role, int | None]:
    """A module's name without its layer; other numbers (of experts) are passed over, too."""
    match = re.fullmatch(r"(.+?)\.(\d+)(?:\.(.+))?", module)
    if match is None:
        return _Role("", module), None
    name = re.sub(r"(?<![^.])\d+(?![^.])", "*", match[3] or "")
    return _Role(match[1], name), int(match[2])


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as ``0-2,5``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
